"""State transfer between processes: real servers on loopback, some of them cut off, wrong or refusing."""

from __future__ import annotations

import os
import random
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from holdfast.core.ids import Generation
from holdfast.errors import AuthError, InternalError, PeerLost
from holdfast.runtime.net import blocking_channel, request_server
from holdfast.runtime.net.addresses import LOOPBACK, Address
from holdfast.runtime.net.blocking_channel import BlockingChannel
from holdfast.runtime.net.service_names import state_of
from holdfast.runtime.worker import state_transfer
from holdfast.runtime.worker.state_transfer import PIECE_SIZE_BYTES, StateServer, Wanted, fetch
from holdfast.sealing import Secret
from holdfast.store.layouts.box import Box, Extent
from tests.runtime.runs import SOURCE

SECRET = Secret(b"t" * 32)
FIRST = Generation(1, 1)
VALUES = b"plain values"
BIG = 2 * PIECE_SIZE_BYTES + 17
SIZES = {"big": BIG, "small": 5, "other": PIECE_SIZE_BYTES}


def content(fqn: str) -> bytes:
    """Return the bytes of a tensor that every holder has."""
    return random.Random(fqn).randbytes(SIZES[fqn])


def box(fqn: str) -> Box:
    """Return the whole of a tensor of bytes as a box."""
    return Box((0,), (SIZES[fqn],))


def view(fqn: str, asked: Box, start: int, stop: int) -> memoryview:
    """Return the bytes of a correct holder."""
    if fqn not in SIZES or asked != box(fqn):
        raise InternalError(f"this rank does not hold {fqn}{asked}")
    return memoryview(content(fqn))[start:stop]


class Servers:
    """Servers by rank, and the boxes that a newcomer wants."""

    def __init__(self) -> None:
        self.at: dict[int, Address] = {}
        self.open: list[StateServer] = []
        self.buffers = {fqn: bytearray(size) for fqn, size in SIZES.items()}

    def add(self, rank: int, secret: Secret = SECRET, **changed: object) -> StateServer:
        """Start one more server."""
        server = StateServer(changed.get("view", view), VALUES, secret, state_of(rank, FIRST))  # type: ignore[arg-type]
        self.at[rank] = server.start(LOOPBACK)
        self.open.append(server)
        return server

    def wanted(self, holders: tuple[int, ...]) -> list[Wanted]:
        """Return requests for all boxes, each held by ``holders``."""
        return [Wanted(fqn, box(fqn), memoryview(data), holders) for fqn, data in self.buffers.items()]

    def check(self) -> None:
        """Check that every byte arrived."""
        assert {fqn: bytes(data) for fqn, data in self.buffers.items()} == {
            fqn: content(fqn) for fqn in SIZES
        }


@pytest.fixture
def servers() -> Iterator[Servers]:
    made = Servers()
    yield made
    for server in made.open:
        server.close()


def test_the_load_is_spread_over_all_holders(servers: Servers) -> None:
    asked: dict[int, int] = {0: 0, 3: 0}
    for rank in asked:

        def counted(fqn: str, at: Box, start: int, stop: int, rank: int = rank) -> memoryview:
            asked[rank] += 1
            return view(fqn, at, start, stop)

        servers.add(rank, view=counted)
    assert fetch(servers.at, servers.wanted((0, 3)), SECRET, FIRST) == VALUES
    servers.check()
    assert all(count >= 2 for count in asked.values()), asked


def test_another_holder_makes_up_for_one_that_refuses(servers: Servers) -> None:
    def nothing(fqn: str, at: Box, start: int, stop: int) -> memoryview:
        raise InternalError("gone")

    servers.add(0, view=nothing)
    servers.add(1)
    assert fetch(servers.at, servers.wanted((0, 1)), SECRET, FIRST) == VALUES
    servers.check()
    with pytest.raises(PeerLost, match="gone"):
        fetch({0: servers.at[0]}, servers.wanted((0,)), SECRET, FIRST)


@contextmanager
def changing(port: int, at: int) -> Iterator[int]:
    """Yield the port of a relay to ``port``, which changes one bit of the answers."""

    def lead(client: socket.socket) -> None:
        with client, socket.create_connection(("127.0.0.1", port)) as server:
            ends, passed = {client: server, server: client}, 0
            while True:
                for sock in select.select(list(ends), [], [])[0]:
                    data = bytearray(sock.recv(1 << 16))
                    if not data:
                        return
                    if sock is server:
                        if passed <= at < passed + len(data):
                            data[at - passed] ^= 1
                        passed += len(data)
                    ends[sock].sendall(data)

    def accept() -> None:
        with suppress(OSError):  # the connection is closed
            while True:
                threading.Thread(target=lead, args=(listener.accept()[0],), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=accept, daemon=True).start()
        yield listener.getsockname()[1]
        listener.shutdown(socket.SHUT_RDWR)


@pytest.mark.parametrize(
    ("local", "secret"),
    [(True, SECRET), (False, SECRET), (False, SECRET._replace(encrypts=True))],
    ids=["loopback", "hosts", "encrypted"],
)
@pytest.mark.parametrize("at", [0, 120, 400, 1_000_000, PIECE_SIZE_BYTES + 10_000])
def test_bytes_that_a_stranger_has_changed_are_not_taken(
    servers: Servers, monkeypatch: pytest.MonkeyPatch, at: int, local: bool, secret: Secret
) -> None:
    monkeypatch.setattr(blocking_channel, "is_local", lambda sock: local)
    monkeypatch.setattr(request_server, "is_local", lambda sock: local)
    servers.add(0, secret)
    servers.add(1, secret)
    with changing(servers.at[0][1], at) as port:
        servers.at[0] = Address("127.0.0.1", port)
        assert fetch(servers.at, servers.wanted((0, 1)), secret, FIRST, (1,)) == VALUES
        servers.check()
        alone = {0: servers.at[0]}
        with pytest.raises(PeerLost, match="rank 0 does not give its state"):
            fetch(alone, servers.wanted((0,)), secret, FIRST)


def test_the_state_of_another_rank_or_of_before_is_not_taken(servers: Servers) -> None:
    """An attacker leads the connection to a server that was not asked."""
    servers.add(0)
    for sources, generation in (({1: servers.at[0]}, FIRST), ({0: servers.at[0]}, FIRST.next())):
        with pytest.raises(PeerLost, match="another service does"):
            fetch(sources, [], SECRET, generation)


CHILD = """
import sys, time
from tests.runtime.test_state_transfer import SECRET, VALUES, view
from holdfast.core.ids import Generation
from holdfast.runtime.net.addresses import LOOPBACK
from holdfast.runtime.worker.state_transfer import StateServer
from holdfast.runtime.net.service_names import state_of
FIRST = Generation(1, 1)
def slow(fqn, box, start, stop):
    if fqn == "big":
        print("asked", flush=True)
        time.sleep(60)
    return view(fqn, box, start, stop)
print(StateServer(slow, VALUES, SECRET, state_of(0, FIRST)).start(LOOPBACK).port, flush=True)
time.sleep(60)
"""


def test_a_holder_that_is_killed_while_it_serves(servers: Servers) -> None:
    env = {**os.environ, "PYTHONPATH": f"{SOURCE}:{SOURCE.parent}"}
    with subprocess.Popen(
        [sys.executable, "-c", CHILD], stdout=subprocess.PIPE, env=env, cwd=SOURCE.parent
    ) as child:
        assert child.stdout is not None
        servers.at[0] = Address("127.0.0.1", int(child.stdout.readline()))
        servers.add(1)

        def kill(fqn: str, at: Box, start: int, stop: int) -> memoryview:
            assert child.stdout is not None and child.stdout.readline() == b"asked\n"
            os.kill(child.pid, signal.SIGKILL)
            servers.open[0]._view = view
            return view(fqn, at, start, stop)

        servers.open[0]._view = kill
        assert fetch(servers.at, servers.wanted((0, 1)), SECRET, FIRST) == VALUES
    servers.check()


def test_a_stranger_gets_nothing(servers: Servers) -> None:
    servers.add(0)
    with pytest.raises((PeerLost, AuthError), match="token"):
        fetch(servers.at, servers.wanted((0,)), Secret(b"x" * 32), FIRST)
    assert not any(servers.buffers["big"])


def test_what_nobody_holds_is_named(servers: Servers, tmp_path: Path) -> None:
    servers.add(0)
    with pytest.raises(PeerLost, match="no rank gives big"):
        fetch(servers.at, servers.wanted((7,)), SECRET, FIRST)


@pytest.mark.parametrize(
    ("start", "size_bytes"),
    [(BIG, 1), (BIG - 3, 4), (0, PIECE_SIZE_BYTES + 1), (-1, 2), (0, 0), (0, -1)],
)
def test_a_question_for_bytes_that_are_not_there_is_refused(
    servers: Servers, start: int, size_bytes: int
) -> None:
    servers.add(0)
    line: BlockingChannel[state_transfer.Talk] = BlockingChannel.connect(
        state_transfer._CODEC, servers.at[0], SECRET, state_of(0, FIRST), state_transfer.ROLE
    )
    piece = Extent("big", Box((0,), (BIG,)), start, start + size_bytes)
    for pieces in ((piece,), ()):
        line.send(state_transfer.AskPieces(pieces))
        assert isinstance(line.receive_answer(5.0), state_transfer.Refusal)
    line.close()
