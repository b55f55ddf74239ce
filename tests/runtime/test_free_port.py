"""The choice of a TCP port on which a process listens later."""

from __future__ import annotations

import random
import socket
from pathlib import Path

import pytest

from holdfast.runtime.node import spawn
from holdfast.runtime.node.spawn import free_port

OUTGOING = Path("/proc/sys/net/ipv4/ip_local_port_range")


@pytest.mark.skipif(not OUTGOING.exists(), reason="needs Linux")
@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_no_outgoing_connection_gets_the_port(host: str) -> None:
    """Regression: a connection of another process took the port before the caller listened on it."""
    if host == "::1" and not socket.has_ipv6:
        pytest.skip("needs IPv6")
    first, last = map(int, OUTGOING.read_text().split())
    before = random.getstate()
    ports = [free_port(host) for _ in range(50)]
    assert not any(first <= port <= last for port in ports) or first <= 20000
    assert len(set(ports)) > 30
    assert random.getstate() == before, "the random numbers of a script stay as they are"


@pytest.mark.parametrize("text", ["1024 65535", "", "none"])
def test_without_other_ports_the_kernel_chooses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    (tmp_path / "range").write_text(text)
    monkeypatch.setattr(spawn, "_OUTGOING", tmp_path / "range")
    with socket.create_server(("127.0.0.1", free_port())) as server:
        assert server.getsockname()[1] > 0


def test_a_foreign_address_is_an_error() -> None:
    with pytest.raises(OSError, match="assign"):
        free_port("192.0.2.1")
