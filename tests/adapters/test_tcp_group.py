"""The TCP group: sums in rank order, faults that all ranks see, never a wrong sum."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from holdfast.core.ids import Generation, MemberId
from holdfast.core.protocol.messages import KvReply, KvRequest
from holdfast.errors import GroupError, PeerLost, UsageError
from holdfast.frameworks.common import tcp_group as mesh_module
from holdfast.frameworks.common.tcp_group import (
    SHORT_SIZE_BYTES,
    START_S,
    START_VARIABLE,
    GroupAddress,
    TcpGroup,
    Vector,
    meet,
    start_limit_s,
)
from holdfast.runtime.agent.kv_server import KvServer
from holdfast.runtime.net.addresses import LOOPBACK, Address
from holdfast.runtime.worker.worker_client import WorkerClient

FIRST = Generation(1, 1)
BOUND_S = 30.0


class Line:
    """A client for a mesh: the agent's key-value store without the agent."""

    def __init__(self, server: KvServer, lock: threading.Lock, member: int) -> None:
        self.fenced = False
        self._server = server
        self._lock = lock
        self._member = MemberId(member + 1)
        self._number = 0

    def kv(
        self, op: Any, keys: tuple[str, ...] = (), value: bytes = b"", *, timeout_s: float = 1.0, **_: Any
    ) -> KvReply:
        """Answer a request as ``WorkerClient.kv`` does."""
        deadline_s = time.monotonic() + timeout_s
        while True:
            with self._lock:
                self._number += 1
                message = KvRequest(
                    request_id=self._number, op="check" if op == "wait" else op, keys=keys, value=value
                )
                reply = self._server.request(0.0, self._member, message)[0][1]
            if op != "wait" or reply.ok:
                return reply
            if time.monotonic() > deadline_s:
                return KvReply(request_id=0, ok=False, error="timeout")
            time.sleep(0.005)


class World:
    """Meshes of several ranks, each in a thread."""

    def __init__(self, folder: Path, size: int, at: Address = LOOPBACK, encrypts: bool = False) -> None:
        self.server = KvServer.open(folder / "kv")
        self.lock = threading.Lock()
        self.lines = [Line(self.server, self.lock, rank) for rank in range(size)]
        ranks = range(size)
        own = [at._replace(host=f"{at.host}-{rank}") if at.is_path else at for rank in ranks]
        self.meshes = [TcpGroup(cast(WorkerClient, self.lines[r]), r, size, own[r], encrypts) for r in ranks]

    def each(self, act: Callable[[TcpGroup], Any], but: int = -1) -> list[Any]:
        """Run ``act`` on every rank at the same time. Return the result or the exception of each."""
        results: list[Any] = [None] * len(self.meshes)

        def run(mesh: TcpGroup) -> None:
            try:
                results[mesh.rank] = act(mesh)
            except Exception as error:
                results[mesh.rank] = error

        threads = [threading.Thread(target=run, args=(m,)) for m in self.meshes if m.rank != but]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(BOUND_S)
            assert not thread.is_alive()
        return results

    def close(self) -> None:
        """Close all meshes."""
        for mesh in self.meshes:
            mesh.close()


def vector(rank: int, numel: int, dtype: str) -> Vector:
    """Return values whose float sum depends on the order."""
    rng = np.random.default_rng(rank)
    return (rng.standard_normal(numel) * 10.0 ** rng.integers(-6, 6, numel)).astype(dtype)


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("numel", [0, 1, 7, SHORT_SIZE_BYTES // 4, SHORT_SIZE_BYTES // 4 + 1, 300_001])
def test_sums_are_those_of_the_rank_order(tmp_path: Path, size: int, numel: int) -> None:
    world = World(tmp_path, size)
    for result in world.each(lambda mesh: mesh.connect(FIRST)):
        assert result is None
    for dtype in ("float32", "int64"):
        expected = vector(0, numel, dtype)
        for rank in range(1, size):
            expected = expected + vector(rank, numel, dtype)
        for _ in range(2):
            for result in world.each(lambda mesh, d=dtype: mesh.sum(vector(mesh.rank, numel, d))):  # type: ignore[misc]
                assert result.dtype == dtype and result.tobytes() == expected.tobytes()
    world.close()


def test_a_lost_rank_ends_every_wait_and_the_next_generation_works(tmp_path: Path) -> None:
    world = World(tmp_path, 4)
    world.each(lambda mesh: mesh.connect(FIRST))
    faults: list[int] = []
    for mesh in world.meshes:
        mesh.on_fault = lambda reason, rank=mesh.rank: faults.append(rank)  # type: ignore[misc]
    world.meshes[2].close()  # as the kernel does for a killed process
    results = world.each(lambda mesh: mesh.sum(vector(mesh.rank, 100_000, "float32")), but=2)
    assert all(isinstance(results[rank], PeerLost) for rank in (0, 1, 3))
    assert sorted(faults) == [0, 1, 3]
    results = world.each(lambda mesh: mesh.sum(vector(mesh.rank, 3, "int64")), but=2)
    # no sum passes before a new generation
    assert all(isinstance(results[rank], PeerLost) for rank in (0, 1, 3))
    for result in world.each(lambda mesh: mesh.reconfigure(FIRST.next())):
        assert result is None
    results = world.each(lambda mesh: mesh.sum(np.ones(3, np.int64)))
    assert all(result.tolist() == [4, 4, 4] for result in results)
    world.close()


def test_poison_frees_a_rank_that_waits(tmp_path: Path) -> None:
    world = World(tmp_path, 2)
    world.each(lambda mesh: mesh.connect(FIRST))
    caught: list[Exception] = []

    def wait() -> None:
        try:
            world.meshes[0].sum(np.ones(4, np.float32))
        except PeerLost as error:
            caught.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    world.meshes[0].poison("fenced: rank 1 was stopped")
    thread.join(BOUND_S)
    assert not thread.is_alive() and "rank 1 was stopped" in str(caught[0])
    world.close()


def test_ranks_in_different_collectives_get_no_sum(tmp_path: Path) -> None:
    world = World(tmp_path, 2)
    world.each(lambda mesh: mesh.connect(FIRST))
    results = world.each(lambda mesh: mesh.sum(np.ones(4 + mesh.rank, np.float32)))
    assert all(isinstance(result, PeerLost) for result in results)
    world.close()


def test_the_missing_ranks_are_named(tmp_path: Path) -> None:
    world = World(tmp_path, 4)
    world.meshes = [mesh for mesh in world.meshes if mesh.rank not in (1, 3)]
    errors: list[str] = []

    def connect(mesh: TcpGroup) -> None:
        try:
            mesh.connect(FIRST, timeout_s=0.6)
        except GroupError as error:
            errors.append(error.message)

    threads = [threading.Thread(target=connect, args=(mesh,)) for mesh in world.meshes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(BOUND_S)
    assert errors == ["ranks 1, 3 of 4 did not come up within 0.6 s"] * 2
    world.close()


def test_a_fence_ends_the_meeting(tmp_path: Path) -> None:
    world = World(tmp_path, 2)
    world.lines[0].fenced = True
    with pytest.raises(GroupError, match="a recovery began"):
        world.meshes[0].connect(FIRST)


def test_strangers_are_refused(tmp_path: Path) -> None:
    """A connection without the secret is closed and counted. The members still find each other."""
    world = World(tmp_path, 2)
    opened: list[bytes] = []
    knocked = threading.Event()

    def intrude() -> None:
        line = Line(world.server, world.lock, 7)
        key = (f"mesh/{FIRST}/0",)
        assert line.kv("wait", key, timeout_s=BOUND_S).ok
        import msgspec

        place = msgspec.json.decode(line.kv("get", key).value, type=GroupAddress)
        with socket.create_connection((place.host, place.port), 5) as sock:
            sock.sendall(b"GET / HTTP/1.1\r\nHost: somebody else entirely, long enough\r\n\r\n")
            sock.settimeout(BOUND_S)
            knocked.set()
            try:
                opened.append(sock.recv(1))
            except ConnectionResetError:
                opened.append(b"")

    intruder = threading.Thread(target=intrude)
    intruder.start()
    waiter = threading.Thread(target=lambda: world.meshes[0].connect(FIRST))
    waiter.start()
    assert knocked.wait(BOUND_S)
    world.meshes[1].connect(FIRST)
    waiter.join(BOUND_S)
    intruder.join(BOUND_S)
    assert opened == [b""]
    assert world.meshes[0].refused == 1
    results = world.each(lambda mesh: mesh.sum(np.ones(2, np.float32)))
    assert all(result.tolist() == [2.0, 2.0] for result in results)
    world.close()


def test_meet_publishes_and_finds(tmp_path: Path) -> None:
    world = World(tmp_path, 1)
    own = GroupAddress("127.0.0.1", 1234, b"k")
    assert meet(cast(WorkerClient, world.lines[0]), "space", 0, 1, own, 1.0) == {0: own}


def test_the_start_up_deadline_of_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    assert start_limit_s() == START_S
    monkeypatch.setenv(START_VARIABLE, "2.5")
    assert start_limit_s() == 2.5
    for wrong in ("abc", "0", "-1", "nan", "inf"):
        monkeypatch.setenv(START_VARIABLE, wrong)
        with pytest.raises(UsageError, match=f"{START_VARIABLE}={wrong} is no positive number") as caught:
            start_limit_s()
        assert START_VARIABLE in caught.value.hint


@pytest.fixture
def hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Place each rank on its own host: loopback stands for the network between them."""
    monkeypatch.setattr(mesh_module, "is_local", lambda sock: False)


@pytest.mark.usefixtures("hosts")
@pytest.mark.parametrize("encrypts", [False, True], ids=["tagged", "encrypted"])
@pytest.mark.parametrize("numel", [0, 1, SHORT_SIZE_BYTES // 4, 300_001])
def test_sums_between_hosts_are_the_same(tmp_path: Path, numel: int, encrypts: bool) -> None:
    world = World(tmp_path, 3, encrypts=encrypts)
    world.each(lambda mesh: mesh.connect(FIRST))
    expected = vector(0, numel, "float32") + vector(1, numel, "float32") + vector(2, numel, "float32")
    for _ in range(2):
        for result in world.each(lambda mesh: mesh.sum(vector(mesh.rank, numel, "float32"))):
            assert result.tobytes() == expected.tobytes()
    world.close()


@pytest.mark.usefixtures("hosts")
@pytest.mark.parametrize("numel", [4, 100_000])
@pytest.mark.parametrize("encrypts", [False, True], ids=["tagged", "encrypted"])
@pytest.mark.parametrize("at", [0, 20, 40])
def test_a_vector_that_was_changed_between_hosts_is_not_summed(
    tmp_path: Path, numel: int, at: int, encrypts: bool
) -> None:
    """The change is in the bytes of a gradient, of its header or of its tag."""
    world = World(tmp_path, 2, encrypts=encrypts)
    world.each(lambda mesh: mesh.connect(FIRST))
    line = world.meshes[0]._peers[1]
    world.meshes[0]._peers[1] = line._replace(sock=cast(socket.socket, Changing(line.sock, at)))
    result = world.each(lambda mesh: mesh.sum(np.ones(numel, np.float32)))[1]
    assert isinstance(result, PeerLost) and world.meshes[1].poisoned, result
    assert world.meshes[1].refused == 1
    world.close()


@pytest.mark.parametrize("encrypts", [False, True], ids=["plain", "encrypted"])
@pytest.mark.parametrize("numel", [16, 300_001])
def test_an_encrypted_vector_is_not_seen(tmp_path: Path, numel: int, encrypts: bool) -> None:
    """On one host, too: two launchers may stand for two hosts."""
    world = World(tmp_path, 2, encrypts=encrypts)
    world.each(lambda mesh: mesh.connect(FIRST))
    line = world.meshes[0]._peers[1]
    recording = Recording(line.sock)
    world.meshes[0]._peers[1] = line._replace(sock=cast(socket.socket, recording))
    own = vector(0, numel, "float32")
    for result in world.each(lambda mesh: mesh.sum(vector(mesh.rank, numel, "float32"))):
        assert result.tobytes() == (own + vector(1, numel, "float32")).tobytes()
    seen = (
        own[numel // 2 :].tobytes()[:64] in recording.sent
    )  # long ones send each other the half that is not theirs
    assert seen is not encrypts
    world.close()


class Recording:
    """A socket that notes what goes out."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self.sent = b""

    def sendmsg(self, parts: list[memoryview]) -> int:
        """Send data, and keep a copy of the sent bytes."""
        count = self._sock.sendmsg(parts)
        self.sent += b"".join(parts)[:count]
        return count

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sock, name)


class Changing:
    """A socket that changes one bit of the data that it sends."""

    def __init__(self, sock: socket.socket, at: int) -> None:
        self._sock = sock
        self._at = at

    def sendmsg(self, parts: list[memoryview]) -> int:
        """Send data with one bit changed."""
        data = bytearray(b"".join(parts)[: 1 << 16])
        if 0 <= self._at < len(data):
            data[self._at] ^= 1
        sent = self._sock.send(data)
        self._at -= sent
        return sent

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sock, name)
