"""The transfer of state between processes: survivors serve their boxes, a newcomer fetches those it needs.

Theory. A box is a rectangle of a tensor. The layouts list, for each box of a newcomer, the ranks that hold an identical
box. The newcomer cuts every box into *pieces* (byte ranges), and assigns each piece to the holder with the least load.
It sends requests to all holders in parallel, with one connection and one thread each. Pieces travel in batches of raw
bytes, from memory to memory. An authentication tag follows each batch (``sealing.py``). It proves that the bytes are
those that the holder has sent. If a tag does not match or a holder is lost, the newcomer requests the missing pieces
from other holders. Nothing is written to disk. The sizes of buffers come from the layout, so no peer can make the
newcomer allocate memory.

Invariants:
1. When :func:`fetch` returns, every byte of every buffer has arrived with a matching tag.
2. A server sends only boxes that its rank declared. It ends with :meth:`StateServer.close`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import NoReturn, TypeVar

import msgspec

from holdfast.core.ids import Generation
from holdfast.errors import HoldfastError, PeerLost, ProtocolError
from holdfast.runtime.net.addresses import Address
from holdfast.runtime.net.blocking_channel import BlockingChannel
from holdfast.runtime.net.request_server import TIMEOUT_S, AnswerServer
from holdfast.runtime.net.service_names import state_of
from holdfast.sealing import Secret
from holdfast.store.layouts.box import Box, Extent
from holdfast.wire import Codec

PIECE_SIZE_BYTES = 4 * 1024 * 1024
ROLE = "worker"
A = TypeVar("A")


class AskPieces(msgspec.Struct, frozen=True, tag=True):
    """A request for pieces (byte ranges) of boxes, together at most ``PIECE_SIZE_BYTES`` bytes."""

    pieces: tuple[Extent, ...]


class AskValues(msgspec.Struct, frozen=True, tag=True):
    """A request for the plain (non-tensor) values that are common to all ranks."""


class Pieces(msgspec.Struct, frozen=True, tag=True):
    """The answer to ``AskPieces``. The requested bytes follow this message.

    They are the raw bytes of the pieces (byte ranges of boxes), in the order of the request. One tag, which
    authenticates all of them, comes last.
    """


class Values(msgspec.Struct, frozen=True, tag=True):
    """The answer to ``AskValues``: the encoded plain values."""

    data: bytes


class Refusal(msgspec.Struct, frozen=True, tag=True):
    """The answer to a request for a box that the server does not hold, or to a malformed request."""

    reason: str


Talk = AskPieces | AskValues | Pieces | Values | Refusal
_CODEC: Codec[Talk] = Codec(Talk)  # type: ignore[arg-type]

View = Callable[[str, Box, int, int], memoryview]
"""A function of (tensor name, box, start, end) that returns the bytes start to end of a box, or to its last byte."""


class Wanted(msgspec.Struct, frozen=True):
    """A box of tensor ``fqn`` to fetch into ``buffer`` (writable, C-contiguous bytes).

    ``holders``: the ranks that hold the box.
    """

    fqn: str
    box: Box
    buffer: memoryview
    holders: tuple[int, ...]


class StateServer(AnswerServer[Talk]):
    """A server that sends one state of this rank to processes of the same run. The state must not change until the end.

    Args:
        view: returns the bytes of a box that this rank holds; raises :class:`HoldfastError` for another box, and for a
            box that it cannot read.
        values: the encoded plain values.
        secret: secret of the run.
        service: the service name for this rank and generation, see ``service_names.py``.
        moved: called with the number of bytes that are about to be sent.
    """

    def __init__(
        self, view: View, values: bytes, secret: Secret, service: str, moved: Callable[[int], object] = int
    ) -> None:
        super().__init__(_CODEC, secret, service)
        self._moved = moved
        self._view = view
        self._values = values
        self._lock = threading.Lock()  # ``view`` may copy; one call at a time bounds the memory

    def _answer(self, message: Talk) -> tuple[Talk, Sequence[memoryview]]:
        if isinstance(message, AskValues):
            return Values(self._values), ()
        if not isinstance(message, AskPieces) or not _is_right(message.pieces):
            return Refusal("not a request"), ()
        try:
            with self._lock:
                found = [self._find(piece) for piece in message.pieces]
        except HoldfastError as error:
            return Refusal(error.message), ()
        self._moved(sum(map(len, found)))
        return Pieces(), found

    def _find(self, piece: Extent) -> memoryview:
        data = self._view(piece.fqn, piece.box, piece.start, piece.stop)
        if len(data) != piece.size_bytes:
            raise ProtocolError(f"{piece.fqn} has no {piece.stop} bytes here, as many were asked for")
        return data


def fetch(
    sources: Mapping[int, Address],
    wanted: Sequence[Wanted],
    secret: Secret,
    generation: Generation,
    values_from: Sequence[int] = (),
    moved: Callable[[int], object] = int,
) -> bytes:
    """Fill all buffers from the holders of their boxes, and return the encoded plain values.

    Args:
        sources: for each rank, the address of its server.
        wanted: the boxes to fetch.
        secret: secret of the run.
        generation: generation of the servers.
        values_from: ranks to ask for the plain values, in this order until one answers. If empty, they are asked in
            the order of ranks.
        moved: called with the number of bytes of each batch that has arrived.

    Raises:
        PeerLost: for some piece, no holder is left that sends it.
    """
    peers = {rank: _SourcePeer(rank, at, secret, state_of(rank, generation)) for rank, at in sources.items()}
    try:
        with ThreadPoolExecutor(max(1, len(peers)), thread_name_prefix="holdfast-fetch") as pool:
            order = [peers[rank] for rank in values_from or sorted(peers)]
            values = pool.submit(_first_values, order)
            todo = _parts(wanted)
            while todo:
                shares = _share_out(todo, peers)
                takers = [peers[rank] for rank in shares]
                refused = pool.map(partial(_take, moved=moved), takers, shares.values())
                todo = [part for parts in refused for part in parts]
            return values.result()
    finally:
        for peer in peers.values():
            peer.close()


class _FetchedPart(msgspec.Struct):
    """One piece (byte range) of a wanted box."""

    wanted: Wanted
    piece: Extent

    @property
    def size_bytes(self) -> int:
        return self.piece.size_bytes

    @property
    def goal(self) -> memoryview:
        return self.wanted.buffer[self.piece.start : self.piece.stop]


class _SourcePeer:
    """The connection to one holder, opened at its first use.

    ``lost``: why the connection is no longer used; empty if it is in use.
    """

    def __init__(self, rank: int, at: Address, secret: Secret, service: str) -> None:
        self.rank = rank
        self.lost = ""
        self._at = at
        self._secret = secret
        self._service = service
        self._lock = threading.Lock()
        self._channel: BlockingChannel[Talk] | None = None

    def values(self) -> bytes:
        """Fetch and return the encoded plain values of the holder's state. Raises: PeerLost."""
        with self._lock:
            return self._ask(AskValues(), Values, ()).data

    def take(self, parts: Sequence[_FetchedPart]) -> None:
        """Fetch ``parts`` from the holder into their buffers. Raises: PeerLost."""
        goals = [part.goal for part in parts]
        with self._lock:
            self._ask(AskPieces(tuple(part.piece for part in parts)), Pieces, goals)

    def _ask(self, question: Talk, kind: type[A], goals: Sequence[memoryview]) -> A:
        if self.lost:
            raise PeerLost(self.lost)
        try:
            if self._channel is None:
                self._channel = BlockingChannel.connect(_CODEC, self._at, self._secret, self._service, ROLE)
            self._channel.send(question)
            answer = self._channel.receive_answer(TIMEOUT_S)
            if isinstance(answer, kind):
                if goals:
                    self._channel.receive_batch(goals, TIMEOUT_S)
                return answer
        except (OSError, ProtocolError) as error:
            self._give_up(f"does not give its state: {error}")
        self._give_up(f"does not give its state: {getattr(answer, 'reason', 'it answers nonsense')}")

    def _give_up(self, why: str) -> NoReturn:
        self.lost = f"rank {self.rank} {why}"
        raise PeerLost(self.lost)

    def close(self) -> None:
        if self._channel is not None:
            self._channel.close()


def _first_values(peers: Sequence[_SourcePeer]) -> bytes:
    """Return the encoded plain values from the first of ``peers`` that sends them."""
    for peer in peers[:-1]:
        try:
            return peer.values()
        except PeerLost:
            continue
    return peers[-1].values()


def _parts(wanted: Sequence[Wanted]) -> list[_FetchedPart]:
    return [
        _FetchedPart(want, Extent(want.fqn, want.box, start, min(start + PIECE_SIZE_BYTES, len(want.buffer))))
        for want in wanted
        for start in range(0, len(want.buffer), PIECE_SIZE_BYTES)
    ]


def _share_out(
    parts: Sequence[_FetchedPart], peers: Mapping[int, _SourcePeer]
) -> dict[int, list[_FetchedPart]]:
    """Assign each piece to the holder with the fewest bytes to send. Return the pieces by rank. Raises: PeerLost."""
    shares: dict[int, list[_FetchedPart]] = {}
    load = dict.fromkeys(peers, 0)
    for part in sorted(parts, key=lambda p: -p.size_bytes):
        holders = [rank for rank in part.wanted.holders if rank in peers and not peers[rank].lost]
        if not holders:
            reasons = "; ".join(peer.lost for peer in peers.values() if peer.lost)
            raise PeerLost(
                f"no rank gives {part.wanted.fqn}{part.wanted.box} ({reasons or 'no rank holds it'})"
            )
        rank = min(holders, key=lambda r: (load[r], r))
        load[rank] += part.size_bytes
        shares.setdefault(rank, []).append(part)
    return shares


def _take(
    peer: _SourcePeer, parts: Sequence[_FetchedPart], moved: Callable[[int], object]
) -> list[_FetchedPart]:
    """Fetch pieces from one holder, and return the pieces that it did not send."""
    done = 0
    while done < len(parts):
        end, size_bytes = done, 0
        while end < len(parts) and size_bytes + parts[end].size_bytes <= PIECE_SIZE_BYTES:
            size_bytes += parts[end].size_bytes
            end += 1
        try:
            peer.take(parts[done:end])
        except PeerLost:
            return list(parts[done:])
        moved(size_bytes)
        done = end
    return []


def _is_right(pieces: Sequence[Extent]) -> bool:
    sizes = [piece.size_bytes for piece in pieces]
    return min(sizes, default=0) > 0 <= min(p.start for p in pieces) and sum(sizes) <= PIECE_SIZE_BYTES
