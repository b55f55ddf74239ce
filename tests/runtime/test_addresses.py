"""Addresses as text: what is read from a user, and what host and port become."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.errors import UsageError
from holdfast.runtime import interfaces
from holdfast.runtime.addresses import endpoint, is_loopback, read_endpoint, read_host, split_endpoint
from holdfast.runtime.interfaces import interface_of

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
