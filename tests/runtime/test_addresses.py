"""Addresses as text: parsing of a user's input, and the text for host and port."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.errors import UsageError
from holdfast.runtime.net.addresses import endpoint, is_loopback, read_endpoint, read_host, split_endpoint
from holdfast.runtime.node import interfaces
from holdfast.runtime.node.interfaces import interface_of, with_interfaces
from holdfast.runtime.node.run_settings import RunSettings
from tests.session.test_listening import can

FLAG = "--rdzv-endpoint"


@given(st.one_of(st.ip_addresses().map(str), st.just("host-0.example")), st.integers(1, 65535))
def test_host_and_port_are_found_again(host: str, port: int) -> None:
    text = endpoint(host, port)
    assert split_endpoint(text) == read_endpoint(text, FLAG, 1) == (host, port)
    assert read_host(host, FLAG) == read_host(f"[{host}]" if ":" in host else host, FLAG) == host


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("host0", ("host0", 29500)),
        ("host0:1", ("host0", 1)),
        ("10.0.0.1", ("10.0.0.1", 29500)),
        ("[fd00::2]", ("fd00::2", 29500)),
        ("[fd00::2]:65535", ("fd00::2", 65535)),
    ],
)
def test_forms_of_a_contact(text: str, found: tuple[str, int]) -> None:
    assert read_endpoint(text, FLAG, 29500) == found


@pytest.mark.parametrize(
    ("text", "wrong", "hint"),
    [
        ("fd00::2", "brackets", "'[fd00::2]:29500'"),
        ("::1", "brackets", "'[::1]:29500'"),
        ("fd00::2:29501", "brackets", "'[fd00::2]:29501'"),
        ("host:1:2", "brackets", "'[fd00::2]:29500'"),
        ("fe80::1%eth0", "scope id", "scope global"),
        ("[fe80::1%eth0]:1", "scope id", "scope global"),
        ("[fd00::2", "HOST:PORT", "10.0.0.1:29500"),
        ("[fd00::2]1", "HOST:PORT", "10.0.0.1:29500"),
        ("[fd00::2]:", "HOST:PORT", "10.0.0.1:29500"),
        ("[host0]:1", "neither a name nor an address", "HOST"),
        ("[10.0.0.1]:1", "neither a name nor an address", "HOST"),
        ("host0:port", "HOST:PORT", "10.0.0.1:29500"),
        ("host0:0", "HOST:PORT", "10.0.0.1:29500"),
        ("host0:65536", "HOST:PORT", "10.0.0.1:29500"),
        ("host0:-1", "HOST:PORT", "10.0.0.1:29500"),
    ],
)
def test_what_is_no_contact_is_refused_with_the_form_that_is_one(text: str, wrong: str, hint: str) -> None:
    with pytest.raises(UsageError) as caught:
        read_endpoint(text, FLAG, 29500)
    assert caught.value.message.startswith(FLAG) and wrong in caught.value.message
    assert hint in caught.value.hint


def test_loopback_of_both_families() -> None:
    assert [is_loopback(text) for text in ("127.0.7.1", "::1", "fd00::2", "10.0.0.1", "localhost")] == [
        *(True, True, False, False, False)
    ]


def test_the_interface_of_an_ipv6_address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = tmp_path / "if_inet6"
    table.write_text(f"fd{'0' * 29}2 04 40 00 80     eth0\n{'0' * 31}1 01 80 10 80       lo\n")
    monkeypatch.setattr(interfaces, "ADDRESSES", table)
    assert [interface_of(text) for text in ("::1", "fd00::2", "fd00::3")] == ["lo", "eth0", ""]


@pytest.mark.skipif(not can(), reason="no network namespaces here (root, unshare, ip)")
def test_the_interface_of_a_second_ipv4_address_and_of_one_with_a_label() -> None:
    """Regression: only an interface's first address was found, so gloo listened at the address of the host's name."""
    adds = "ip addr add 10.66.0.2/24 dev lo && ip addr add 10.67.0.2/24 dev lo label lo:x"
    code = (
        "from holdfast.runtime.node.interfaces import interface_of as of;"
        "print([of(text) for text in ('10.66.0.2', '10.67.0.2', '10.68.0.2')])"
    )
    words = ["unshare", "--net", "sh", "-c", f'{adds} && exec "$@"', "sh", sys.executable, "-c", code]
    found = subprocess.run(words, capture_output=True, text=True, check=True, timeout=60).stdout
    assert found == "['lo', 'lo', '']\n"


@pytest.mark.parametrize(
    ("several", "bind", "set_by_user", "set_by_us"),
    [
        (1, "127.0.0.1", {}, {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "=lo"}),
        (1, "127.0.0.1", {"GLOO_SOCKET_IFNAME": "eth7"}, {"NCCL_SOCKET_IFNAME": "=lo"}),
        (1, "127.0.0.1", {"GLOO_SOCKET_IFNAME": "eth7", "NCCL_SOCKET_IFNAME": "ib0"}, {}),
        (3, "10.0.0.2", {}, {"GLOO_SOCKET_IFNAME": "eth1", "NCCL_SOCKET_IFNAME": "=eth1"}),
        (3, "10.0.0.2", {"NCCL_SOCKET_IFNAME": "ib0"}, {"GLOO_SOCKET_IFNAME": "eth1"}),
    ],
)
def test_the_interfaces_of_collectives(
    several: int,
    bind: str,
    set_by_user: dict[str, str],
    set_by_us: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Collectives use loopback on one host, and the interface of the address in use on several.

    A user's setting is kept.
    """
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in set_by_user.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(
        interfaces, "interface_of", lambda address: {"127.0.0.1": "lo", "10.0.0.2": "eth1"}[address]
    )
    settings = RunSettings(run_id="it", nnodes=several, nnodes_max=several, bind=bind)
    assert with_interfaces(settings).env == set_by_us
