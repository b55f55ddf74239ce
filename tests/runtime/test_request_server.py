"""The server of states, with foreign connections and without a free descriptor."""

from __future__ import annotations

import os
import select
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.runtime.net import request_server
from holdfast.runtime.net.addresses import LOOPBACK, Address
from holdfast.runtime.net.service_names import state_of
from holdfast.runtime.worker.state_transfer import StateServer, fetch
from tests.runtime.runs import BOUND_S, SOURCE
from tests.runtime.test_state_transfer import FIRST, SECRET, VALUES, view

DRIP_S = 0.02
HALF_A_FRAME = b"\0\0\x03\0" + bytes(256)


@pytest.fixture
def at() -> Iterator[Address]:
    """Yield the address of a server."""
    server = StateServer(view, VALUES, SECRET, state_of(0, FIRST))
    yield server.start(LOOPBACK)
    server.close()


def was_cut(sock: socket.socket, wait_s: float) -> bool:
    """Return whether the other side has closed the connection, after reading all that it sent."""
    while select.select([sock], [], [], wait_s)[0]:
        try:
            if not sock.recv(4096):
                return True
        except ConnectionResetError:
            return True
    return False


def test_a_stranger_that_drips_is_cut_at_the_deadline_of_the_handshake(
    at: Address, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(request_server, "HANDSHAKE_TIMEOUT_S", 0.5)
    began_s, sent = time.monotonic(), 0  # before the server may start its clock
    with socket.create_connection(at) as stranger:
        while not was_cut(stranger, DRIP_S):
            assert time.monotonic() - began_s < BOUND_S
            stranger.sendall(HALF_A_FRAME[sent : sent + 1])
            sent += 1
        assert time.monotonic() - began_s >= 0.5 and 0 < sent < len(HALF_A_FRAME)
    assert fetch({0: at}, [], SECRET, FIRST) == VALUES


def test_of_too_many_strangers_the_oldest_are_cut_and_friends_are_served(
    monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    monkeypatch.setattr(request_server, "STRANGERS_MAX", 3)
    at: Address = request.getfixturevalue("at")
    strangers = [socket.create_connection(at) for _ in range(5)]
    try:
        assert all(was_cut(stranger, BOUND_S) for stranger in strangers[:2])
        assert fetch({0: at}, [], SECRET, FIRST) == VALUES
        assert was_cut(strangers[2], BOUND_S), "the friend was a stranger for a moment"
        assert not any(was_cut(stranger, 0) for stranger in strangers[3:])
    finally:
        for stranger in strangers:
            stranger.close()


CHILD = """
import os, resource, sys
from tests.runtime.test_state_transfer import FIRST, SECRET, VALUES, view
from holdfast.runtime.net.addresses import LOOPBACK
from holdfast.runtime.worker.state_transfer import StateServer
from holdfast.runtime.net.service_names import state_of
print(StateServer(view, VALUES, SECRET, state_of(0, FIRST)).start(LOOPBACK).port, flush=True)
soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
sys.stdin.readline()
resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) - 1, hard))
print("none left", flush=True)
sys.stdin.readline()
resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
sys.stdin.readline()
"""


@pytest.mark.processes
def test_a_server_without_a_descriptor_left_serves_again_when_it_has_one() -> None:
    env = {**os.environ, "PYTHONPATH": f"{SOURCE}:{SOURCE.parent}"}
    pipe = subprocess.PIPE
    with subprocess.Popen(
        [sys.executable, "-c", CHILD], stdin=pipe, stdout=pipe, stderr=pipe, env=env, cwd=SOURCE.parent
    ) as child:
        assert child.stdin is not None and child.stdout is not None and child.stderr is not None
        at = Address("127.0.0.1", int(child.stdout.readline()))
        child.stdin.write(b"\n")
        child.stdin.flush()
        assert child.stdout.readline() == b"none left\n"
        with socket.create_connection(at), socket.create_connection(at) as waiting:
            assert b"cannot take a connection" in child.stderr.readline()
            began_s = _cpu_s(child.pid)
            assert not was_cut(waiting, 1.0)
            assert _cpu_s(child.pid) - began_s < 0.5, "it tries again, but not all the time"
            child.stdin.write(b"\n")
            child.stdin.flush()
            assert fetch({0: at}, [], SECRET, FIRST) == VALUES
        child.kill()


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
