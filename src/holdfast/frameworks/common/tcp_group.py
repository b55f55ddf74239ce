"""A process group over plain sockets that sums NumPy vectors and can be rebuilt after a fault.

This group serves the frameworks whose own process group cannot be rebuilt in a running process.

Theory. Every rank is connected to every other rank. A long vector is summed in two exchanges. First, rank r receives
the r-th part of all vectors and adds these parts; then all ranks fetch the sums. A short vector is sent to all ranks,
and each rank adds the vectors. Both methods add in the order of the ranks. So the bits of a sum do not depend on
timing, on earlier sums, or on the method.
After an error a rank breaks all its connections: :meth:`TcpGroup.poison` shuts down every socket of its process. The
peers see the end of the stream, so no rank waits for a vector that will not come.
Each generation has its own connections. Both ends of a connection prove that they have read the secrets of the ranks.
These secrets travel only over the authenticated channel to the agent. The keys of a connection are derived from the
secrets of both ends. Between hosts an authentication tag follows each vector (``sealing.py``).

Invariants:
1. A sum is returned only when the vector of every rank was received in full: never a partial or a stale one.
2. After the first error every call raises until :meth:`reconfigure`.
3. Vectors of different collectives cannot mix: number, length and type are sent before each vector and are compared.
4. A vector from another host is accepted only with a valid tag.
"""

from __future__ import annotations

import math
import os
import secrets
import select
import socket
import struct
import time
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from holdfast.core.ids import Generation
from holdfast.errors import GroupError, InternalError, PeerLost, UsageError
from holdfast.frame_encryption import direction
from holdfast.frameworks.common.adapter import OnCollective
from holdfast.runtime.net.addresses import LOOPBACK, Address
from holdfast.runtime.net.connection_limits import ACCEPT_AGAIN_S, BURST, ConnectionLimits
from holdfast.runtime.net.stream_sockets import dial, is_local, listen, tune
from holdfast.runtime.node.run_settings import RunSettings
from holdfast.runtime.node.rundir import RunDir
from holdfast.runtime.worker.published_values import published
from holdfast.runtime.worker.worker_client import WorkerClient
from holdfast.sealing import (
    KEY_SIZE_BYTES,
    TAG_SIZE_BYTES,
    ConnectionKeys,
    DirectionSeal,
    OpenedBatch,
    same,
)

Vector = NDArray[Any]

MAGIC = b"HFMESH02"
SHORT_SIZE_BYTES = 16 * 1024
PART_SIZE_BYTES = 512 * 1024
PARTS = 3
"""Number of parts that one call gives to the kernel. It is enough for a whole short vector."""
POLL_S = 0.5
HANDSHAKE_S = 10.0
DIALS_MAX = 5
START_S = 120.0
"""How long a rank waits for the others to start, in seconds. The variable ``HOLDFAST_START_S`` overrides this value."""
START_VARIABLE = "HOLDFAST_START_S"
_HELLO = struct.Struct("!8sQI32s")  # magic, generation, rank, nonce
_ANSWER = struct.Struct("!32s32s")  # proof, nonce
_HEAD = struct.Struct("!QQB")  # number, length in bytes, type
_TYPES: tuple[str, ...] = ("float32", "float64", "int64", "float16", "int32")


class GroupAddress(msgspec.Struct, frozen=True):
    """The address on which a rank listens, and the secret that its peers must know."""

    host: str
    port: int
    key: bytes


class TcpGroup:
    """The connections of this process to all other ranks of one generation.

    One thread calls the collectives; any thread may call :meth:`poison`.

    Args:
        client: the connection to the agent; None only if the world size is one.
        rank, world_size: rank of this process and the number of ranks.
        at: the address at which this rank listens, the same in each generation.
        encrypts: True if the data that this rank sends to other hosts is encrypted.
    """

    def __init__(
        self,
        client: WorkerClient | None,
        rank: int,
        world_size: int,
        at: Address = LOOPBACK,
        encrypts: bool = False,
    ) -> None:
        self.rank = rank
        self.world_size = world_size
        self.reason = ""
        self.refused = 0
        self.on_fault: Callable[[str], None] = _ignore
        self.on_collective: OnCollective = _ignore_count
        self._client = client
        self._at = at
        self._encrypts = encrypts
        self._peers: dict[int, _PeerLine] = {}
        self._number = 0
        self._met = False

    @property
    def poisoned(self) -> bool:
        """True after a collective broke or :meth:`poison` was called."""
        return bool(self.reason)

    @property
    def connected(self) -> bool:
        """True after the first call of :meth:`connect`."""
        return self._met

    # ------------------------------------------------------------------ membership

    def connect(self, generation: Generation, timeout_s: float | None = None) -> None:
        """Connect to the other ranks of ``generation``.

        Raises:
            GroupError: not all ranks connected within ``timeout_s`` (default ``START_S``); the error names the
                missing ranks.
        """
        self._close()
        self.reason = ""
        self._number = 0
        self._met = True
        if self.world_size == 1:
            return
        limit_s = start_limit_s() if timeout_s is None else timeout_s
        key = secrets.token_bytes(KEY_SIZE_BYTES)
        listener, at = listen(self._at)
        with listener:
            own = GroupAddress(*at, key)
            places = meet(self._kv(), f"mesh/{generation}", self.rank, self.world_size, own, limit_s)
            deadline_s = time.monotonic() + max(limit_s, HANDSHAKE_S)
            for rank in range(self.rank):
                self._peers[rank] = self._dial(rank, places[rank], generation, key)
            keys = {rank: place.key for rank, place in places.items()}
            self._take_callers(
                listener, _Meeting(generation, self.rank, key, keys, self._encrypts), deadline_s
            )
        for peer in self._peers.values():
            tune(peer.sock)
            peer.sock.setblocking(False)
        if self.poisoned:
            self._fail(self.reason, GroupError)

    def reconfigure(self, generation: Generation) -> None:
        """Drop all connections and connect to the ranks of ``generation``. Raises: GroupError."""
        self.connect(generation)

    def poison(self, reason: str) -> None:
        """Break every collective in progress. Callable from any thread; returns at once."""
        self.reason = self.reason or reason or "poisoned"
        for peer in list(self._peers.values()):
            with suppress(OSError):
                peer.sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close all connections."""
        self._close()

    def _close(self) -> None:
        peers, self._peers = self._peers, {}
        for peer in peers.values():
            peer.sock.close()

    def _kv(self) -> WorkerClient:
        if self._client is None:
            raise InternalError("several ranks without a control plane")
        return self._client

    def _dial(self, rank: int, place: GroupAddress, generation: Generation, key: bytes) -> _PeerLine:
        attempts = 0
        while True:
            attempts += 1
            try:
                return self._greet(rank, place, generation, key)
            # the peer had too many unproved connections, and closed some of them
            except ConnectionResetError as error:
                if attempts == DIALS_MAX or self.poisoned:
                    self._fail(self.reason or f"rank {rank} cannot be reached: {error}", GroupError)
                time.sleep(ACCEPT_AGAIN_S)
            except OSError as error:
                self._fail(f"rank {rank} cannot be reached: {error}", GroupError)

    def _greet(self, rank: int, place: GroupAddress, generation: Generation, key: bytes) -> _PeerLine:
        """Return a connection to ``rank`` on which both ends have proved that they are members of ``generation``.

        Raises:
            OSError: the connection failed, or ``rank`` did not prove its membership.
        """
        nonce = secrets.token_bytes(KEY_SIZE_BYTES)
        sock = dial(Address(place.host, place.port), HANDSHAKE_S)
        try:
            sock.sendall(_HELLO.pack(MAGIC, generation.pack(), self.rank, nonce))
            proof, theirs = _ANSWER.unpack(_read(sock, _ANSWER.size))
            keys = _keys(generation, (rank, place.key, theirs), (self.rank, key, nonce), self._encrypts)
            if not same(proof, keys.server_proof):
                raise ConnectionRefusedError("the answer does not prove that it is a member")
            sock.sendall(keys.client_proof)
            return _line(sock, keys.from_client, keys.from_server, self._encrypts)
        except OSError:
            sock.close()
            raise

    def _take_callers(self, listener: socket.socket, meeting: _Meeting, deadline_s: float) -> None:
        """Accept connections until all higher ranks are connected.

        The handshakes of several connections run at the same time. Raises: GroupError: time is up, or the group is
        poisoned.
        """
        callers: dict[int, _Caller] = {}
        strangers: ConnectionLimits[_Caller] = ConnectionLimits()
        listener.setblocking(False)
        try:
            while missing := sorted(set(range(self.rank + 1, self.world_size)) - set(self._peers)):
                left_s = deadline_s - time.monotonic()
                if left_s <= 0 or self.poisoned:
                    self._fail(self.reason or f"ranks {missing} did not connect", GroupError)
                self._hear(listener, callers, strangers, meeting, min(left_s, POLL_S))
        finally:
            for caller in callers.values():
                caller.sock.close()

    def _hear(
        self,
        listener: socket.socket,
        callers: dict[int, _Caller],
        strangers: ConnectionLimits[_Caller],
        meeting: _Meeting,
        wait_s: float,
    ) -> None:
        """Read from the connecting processes for at most ``wait_s`` seconds.

        A connection that has proved its membership becomes a peer. A connection is closed if it is too slow, sends
        something invalid, or exceeds the allowed number of unproved connections.
        """

        def drop(caller: _Caller) -> None:
            self.refused += 1
            strangers.release(caller)
            del callers[caller.sock.fileno()]
            caller.sock.close()

        poller = select.poll()
        for fd in (listener.fileno(), *callers):
            poller.register(fd, select.POLLIN)
        ready = [fd for fd, _ in poller.poll(1000 * wait_s)]
        # Read before any connection is dropped: a new connection may get the descriptor number of a dropped one.
        for caller in [callers[fd] for fd in ready if fd in callers]:
            try:
                found = caller.hear(meeting, self._peers)
            except OSError:
                drop(caller)
                continue
            if found is not None:
                strangers.release(caller)
                del callers[caller.sock.fileno()]
                self._peers[found[0]] = found[1]
        for caller in [each for each in callers.values() if each.deadline_s < time.monotonic()]:
            drop(caller)
        if listener.fileno() in ready:
            try:
                for _ in range(BURST):
                    caller = _Caller(listener.accept()[0])
                    strangers.accepted()
                    callers[caller.sock.fileno()] = caller
                    for stranger in strangers.admit(caller, caller.sock.fileno()):
                        drop(stranger)
            except BlockingIOError:
                return
            except OSError as error:  # no file descriptor is free, or the network refuses
                for stranger in strangers.refused(error):
                    drop(stranger)
                time.sleep(ACCEPT_AGAIN_S)

    # ------------------------------------------------------------------ collectives

    def sum(self, vector: Vector, among: Sequence[int] | None = None) -> Vector:
        """Return the sum of the vectors of all ranks, added in rank order; shape [n], same type.

        Args:
            vector: vector of this rank, shape [n].
            among: the ranks to sum over, in ascending order and including this rank; None means all. Every rank of the
                group calls this method at the same time. The ranks' sets must form a partition of all ranks.

        Raises:
            PeerLost: a rank is lost, or the group is poisoned.
        """
        mine = np.ascontiguousarray(vector).reshape(-1)
        if mine.dtype.name not in _TYPES:
            raise InternalError(f"a sum of {mine.dtype}; known are {', '.join(_TYPES)}")
        self._number += 1
        self.on_collective(self._number, "sum", False)  # of the session, not of the script
        if self.poisoned:
            self._fail(self.reason, PeerLost)
        members = tuple(range(self.world_size)) if among is None else tuple(among)
        if members == (self.rank,):
            return mine.copy()
        if mine.nbytes <= SHORT_SIZE_BYTES:
            peers = [rank for rank in members if rank != self.rank]
            parts = {rank: np.empty_like(mine) for rank in peers}
            self._exchange(dict.fromkeys(peers, mine), parts)
            return _added({**parts, self.rank: mine})
        return self._sum_long(mine, members)

    def _sum_long(self, mine: Vector, members: Sequence[int]) -> Vector:
        """Sum a long vector: each rank adds one part of all vectors, then fetches the sums of the other parts."""
        peers = [rank for rank in members if rank != self.rank]
        edges = [len(mine) * index // len(members) for index in range(len(members) + 1)]
        slices = {rank: slice(edges[index], edges[index + 1]) for index, rank in enumerate(members)}
        own = mine[slices[self.rank]]
        parts = {rank: np.empty_like(own) for rank in peers}
        self._exchange({rank: mine[slices[rank]] for rank in peers}, parts)
        total = np.empty_like(mine)
        total[slices[self.rank]] = _added({**parts, self.rank: own})
        self._exchange(
            dict.fromkeys(peers, total[slices[self.rank]]),
            {rank: total[slices[rank]] for rank in peers},
        )
        return total

    def _exchange(self, outgoing: dict[int, Vector], incoming: dict[int, Vector]) -> None:
        """Send one vector to each peer in ``outgoing`` and receive one from each, all at the same time."""
        flows = {
            peer.sock.fileno(): _Flow(peer, rank, self._number, outgoing[rank], incoming[rank])
            for rank, peer in self._peers.items()
            if rank in outgoing
        }
        poller = select.poll()
        for fd, flow in flows.items():
            poller.register(fd, flow.wants())
        while flows:
            if self.poisoned:
                self._fail(self.reason, PeerLost)
            for fd, _ in poller.poll(POLL_S * 1000):
                flow = flows[fd]
                try:
                    flow.move()
                except OSError as error:
                    self.refused += isinstance(error, ConnectionAbortedError)
                    self._fail(self.reason or f"rank {flow.rank} is lost: {error}", PeerLost)
                if wants := flow.wants():
                    poller.modify(fd, wants)
                else:
                    poller.unregister(fd)
                    del flows[fd]

    def _fail(self, reason: str, kind: type[PeerLost] | type[GroupError]) -> None:
        first = not self.poisoned
        self.poison(reason)
        if first and kind is PeerLost:
            self.on_fault(reason)
        raise kind(reason)


class _PeerLine(NamedTuple):
    """A connection to a peer, with the seal of each direction, which makes or checks tags."""

    sock: socket.socket
    outgoing: DirectionSeal
    incoming: DirectionSeal
    plain: bool  # both ends are on this host, and nothing is encrypted: vectors have no tags


class _Meeting(NamedTuple):
    """The data with which this rank checks and answers connecting processes: generation, rank, secrets."""

    generation: Generation
    rank: int
    key: bytes
    keys: dict[int, bytes]  # secret of every rank
    encrypts: bool


class _Caller:
    """An accepted connection that has not yet proved its membership."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self.sock = sock
        self.deadline_s = time.monotonic() + HANDSHAKE_S
        self._rank = -1
        self._keys: ConnectionKeys | None = None  # set when the process has sent its rank
        self._own = secrets.token_bytes(KEY_SIZE_BYTES)
        self._data = b""

    def hear(self, meeting: _Meeting, here: Container[int]) -> tuple[int, _PeerLine] | None:
        """Read the next bytes of the handshake and answer them.

        Args:
            meeting: the data to check the handshake with.
            here: the ranks that are connected already.

        Returns:
            Rank and connection once the membership is proved; before that None.

        Raises:
            OSError: the connection was closed, or the process is not one of the missing members.
        """
        wanted_bytes = (_HELLO.size if self._keys is None else KEY_SIZE_BYTES) - len(self._data)
        piece = self.sock.recv(wanted_bytes)
        if not piece:
            raise ConnectionResetError("closed during the handshake")
        self._data += piece
        if len(piece) < wanted_bytes:
            return None
        data, self._data = self._data, b""
        if self._keys is None:
            magic, packed, rank, nonce = _HELLO.unpack(data)
            missing = meeting.rank < rank < len(meeting.keys) and rank not in here
            if magic != MAGIC or packed != meeting.generation.pack() or not missing:
                raise ConnectionRefusedError("not a member of this generation")
            own = (meeting.rank, meeting.key, self._own)
            self._rank, self._keys = (
                rank,
                _keys(meeting.generation, own, (rank, meeting.keys[rank], nonce), meeting.encrypts),
            )
            self.sock.sendall(_ANSWER.pack(self._keys.server_proof, self._own))
            return None
        if self._rank in here or not same(data, self._keys.client_proof):
            raise ConnectionRefusedError("it does not prove that it is a member")
        keys = self._keys
        return self._rank, _line(self.sock, keys.from_server, keys.from_client, meeting.encrypts)


class _Flow:
    """The transfer of one vector to a peer and of one vector from that peer."""

    def __init__(self, line: _PeerLine, rank: int, number: int, outgoing: Vector, incoming: Vector) -> None:
        self.rank = rank
        self._sock = line.sock
        kind = _TYPES.index(outgoing.dtype.name)
        head = memoryview(_HEAD.pack(number, outgoing.nbytes, kind))
        self._later = _sent(line, [head, _bytes(outgoing)])
        self._out = list(islice(self._later, PARTS))
        self._opened = None if line.plain else line.incoming.open_batch(local=False)
        self._unproved: OpenedBatch | None = None  # a complete vector that waits for its tag
        self._tag = bytearray(TAG_SIZE_BYTES)
        self._head = bytearray(_HEAD.size)
        self._expected = _HEAD.pack(number, incoming.nbytes, kind)
        self._in = [memoryview(self._head), _bytes(incoming)]

    def wants(self) -> int:
        """Return the poll events that this transfer waits for; 0 when it is done."""
        return (select.POLLOUT if self._out else 0) | (select.POLLIN if self._in else 0)

    def move(self) -> None:
        """Send the bytes that the socket takes now, and receive the bytes that it has. Raises: OSError."""
        if self._out:
            with suppress(BlockingIOError):
                self._advance(self._out, self._sock.sendmsg(self._out), None)
            if not self._out:
                self._out = list(islice(self._later, PARTS))
        if self._in:
            with suppress(BlockingIOError):
                count = self._sock.recv_into(self._in[0])
                if count == 0:
                    raise ConnectionResetError("it closed the connection")
                checked = len(self._in) == 1
                self._advance(self._in, count, self._opened)
                if not checked and len(self._in) < 2 and bytes(self._head) != self._expected:
                    raise ConnectionAbortedError("it is in another collective")
                if not self._in:
                    self._check()

    def _check(self) -> None:
        """After a complete vector, begin to receive its tag (a MAC). After a complete tag, check the tag.

        Raises:
            OSError: the tag does not fit the vector.
        """
        if self._opened is not None:
            self._unproved, self._opened = self._opened, None
            self._in = [memoryview(self._tag)]
        elif self._unproved is not None and not self._unproved.fits(bytes(self._tag)):
            raise ConnectionAbortedError("what has come is not what it has sent")

    @staticmethod
    def _advance(parts: list[memoryview], count: int, opened: OpenedBatch | None) -> None:
        while parts and count:
            part = parts[0][:count]
            count -= len(part)
            parts[0] = parts[0][len(part) :]
            if opened is not None:
                opened.open(part)
            while parts and not parts[0]:
                parts.pop(0)


def _sent(line: _PeerLine, parts: Sequence[memoryview]) -> Iterator[memoryview]:
    """Yield the bytes to send: ``parts`` unchanged, or ``parts`` sealed, and then the tag (a MAC) of all of them.

    Bytes are sealed only when the caller fetches them.
    """
    if line.plain:
        yield from parts
        return
    batch = line.outgoing.seal_batch(local=False)
    for whole in parts:
        for start in range(0, len(whole), PART_SIZE_BYTES):
            yield memoryview(batch.seal(whole[start : start + PART_SIZE_BYTES]))
    yield memoryview(batch.tag())


def meet(
    client: WorkerClient, space: str, rank: int, world_size: int, own: GroupAddress, limit_s: float
) -> dict[int, GroupAddress]:
    """Publish the address of this rank, and wait for the addresses of all others. Return the addresses by rank.

    Args:
        space: first part of the keys in the agents' key-value store under which the ranks publish.

    Raises:
        GroupError: not all ranks published within ``limit_s`` seconds (the error names the missing ranks), or a fault
            ended the wait.
    """
    keys = tuple(f"{space}/{other}" for other in range(world_size))
    client.kv("set", (keys[rank],), msgspec.json.encode(own))
    deadline_s = time.monotonic() + limit_s
    # Wait in short slices: a fence that comes before the request is queued would not end a long request.
    while not (reply := client.kv("wait", keys, timeout_s=POLL_S)).ok and time.monotonic() < deadline_s:
        if client.fenced or reply.error == "fenced":
            raise GroupError("a recovery began while the ranks were meeting")
        if reply.error == "orphaned":
            raise GroupError("launcher and agent were lost while the ranks were meeting")
    if not reply.ok:
        missing = [other for other, key in enumerate(keys) if not client.kv("check", (key,)).ok]
        raise GroupError(
            f"{'rank' if len(missing) == 1 else 'ranks'} {', '.join(map(str, missing))} of {world_size} "
            f"did not come up within {limit_s:g} s",
            hint=f"read the log of that rank; {START_VARIABLE} gives more seconds",
        )
    return {
        other: msgspec.json.decode(published(client, key, "while the ranks were meeting"), type=GroupAddress)
        for other, key in enumerate(keys)
    }


def start_limit_s() -> float:
    """Return the time in seconds that a rank waits for the others to start.

    Raises:
        UsageError: ``HOLDFAST_START_S`` holds no positive number.
    """
    said = os.environ.get(START_VARIABLE, "")
    if not said:
        return START_S
    try:
        limit_s = float(said)
    except ValueError:
        limit_s = 0.0
    if not 0 < limit_s < math.inf:
        raise UsageError(
            f"{START_VARIABLE}={said} is no positive number of seconds",
            hint=f"for example {START_VARIABLE}=300",
        )
    return limit_s


def host_of(client: WorkerClient | None) -> str:
    """Return the host name or address at which the workers of this node listen for a framework's own connections."""
    if client is None or client.run_dir is None:
        return LOOPBACK.host
    return RunSettings.load(client.run_dir).bind


def group_address(client: WorkerClient | None) -> tuple[Address, bool]:
    """Return the address at which this rank listens for the other ranks, and whether the traffic is encrypted."""
    if client is None or client.run_dir is None:
        return LOOPBACK, False
    settings = RunSettings.load(client.run_dir)
    return settings.address_of(RunDir(client.run_dir), f"group-{client.rank}"), settings.encrypts


def _keys(
    generation: Generation,
    server: tuple[int, bytes, bytes],
    client: tuple[int, bytes, bytes],
    encrypts: bool,
) -> ConnectionKeys:
    """Return the keys of one connection. Each end is given as its rank, its secret and its nonce."""
    context = (
        "mesh",
        str(generation),
        f"rank {client[0]} to {server[0]}",
        *(["encrypted"] if encrypts else []),
    )
    return ConnectionKeys.of(server[1] + client[1], server[2] + client[2], *context)


def _line(sock: socket.socket, outgoing: bytes, incoming: bytes, encrypts: bool) -> _PeerLine:
    """Return a proved connection with the keys of both directions."""
    seals = direction(outgoing, encrypts=encrypts), direction(incoming, encrypts=encrypts)
    return _PeerLine(sock, *seals, is_local(sock) and not encrypts)


def _read(sock: socket.socket, size_bytes: int) -> bytes:
    data = b""
    while len(data) < size_bytes:
        piece = sock.recv(size_bytes - len(data))
        if not piece:
            raise ConnectionResetError("closed during the handshake")
        data += piece
    return data


def _added(parts: Mapping[int, Vector]) -> Vector:
    """Return the sum of the vectors, added in rank order."""
    first, *others = sorted(parts)
    total = parts[first].copy()
    for rank in others:
        total += parts[rank]
    return total


def _bytes(vector: Vector) -> memoryview:
    return vector.view(np.uint8).data


def _ignore(reason: str) -> None:
    """Do nothing: the default of :attr:`TcpGroup.on_fault`."""


def _ignore_count(count: int, what: str, joint: bool) -> None:
    """Do nothing: the default of :attr:`TcpGroup.on_collective`."""
