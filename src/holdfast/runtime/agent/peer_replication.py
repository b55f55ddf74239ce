"""Copies of states on a second node: each agent sends the states of its ranks to its buddy, the agent of the next node.

Theory. A state in shared memory is lost with its node. An agent therefore sends each state that one of its ranks has
kept to its buddy. It sends the slot, which is the file of the state in shared memory: first the data, then the marker,
which declares the data complete. It sends a slot only after the script has run its code after the block. So no slot is
sent twice, and no sent state lacks the effects of that code. The buddy accepts the state if all digests match. The
agent then writes the arrival to the rank's status page. The ranks keep their next state only after they have voted that
all states have arrived. So at any moment every rank's state of one common step is on two nodes. A process that starts
on another node requests its state from all agents.

Invariants:
1. A received slot has a marker only when all its bytes have arrived. A slot that does not match its digests is dropped.
2. ``Word.ARRIVED`` of a status page is the digest of a state that the buddy has confirmed. Without another node it is
   the digest of the newest state.
3. Only complete states are sent.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

import msgspec

from holdfast.core.ids import MemberId, NodeId
from holdfast.core.protocol.messages import HeldStates
from holdfast.core.protocol.peer_messages import Peer
from holdfast.core.protocol.status_page import Word
from holdfast.errors import CheckpointInvalid, ProtocolError, StateError
from holdfast.runtime.agent.agent_events import ReplicationEvent, start_task
from holdfast.runtime.net.addresses import Address
from holdfast.runtime.net.blocking_channel import BlockingChannel
from holdfast.runtime.net.request_server import AnswerServer
from holdfast.runtime.net.service_names import memory_of
from holdfast.runtime.node.run_settings import RunSettings
from holdfast.runtime.node.rundir import RunDir
from holdfast.runtime.node.status_page import Page
from holdfast.sealing import Secret
from holdfast.store.shared_memory.memory_slots import (
    Incoming,
    Slots,
    digest_of,
    kept_steps,
    open_kept,
    read_raw,
)
from holdfast.wire import Codec

PIECE_SIZE_BYTES = 4 * 1024 * 1024
SLOT_SIZE_BYTES_MAX = 1 << 42
LOOK_S = 0.05
ANSWER_S = 5.0
ROLE = "peer"


class ReplicaBegin(msgspec.Struct, frozen=True, tag=True):
    """The announcement of the slot with the state of ``rank`` at ``step``.

    ``size_bytes`` is the size of the slot. ``generation`` is the generation of the process that kept the state, packed
    into one integer.
    """

    rank: int
    step: int
    size_bytes: int
    generation: int


class ReplicaBytes(msgspec.Struct, frozen=True, tag=True):
    """Bytes of the announced slot, from byte offset ``start``."""

    rank: int
    start: int
    data: bytes


class ReplicaMark(msgspec.Struct, frozen=True, tag=True):
    """The marker that declares the announced slot complete, sent after all its bytes."""

    rank: int
    step: int
    data: bytes


class ReplicaRequest(msgspec.Struct, frozen=True, tag=True):
    """A request for bytes of the slot with the state of ``rank`` at ``step``, from byte offset ``start``."""

    rank: int
    step: int
    start: int


class ReplicaAnswer(msgspec.Struct, frozen=True, tag=True):
    """The server's answer to each message. The answer to a ``ReplicaRequest`` has bytes and the marker of the slot.

    ``size_bytes`` is the size of the requested slot, 1 for any other accepted message, and 0 for a refused message.
    """

    size_bytes: int = 0
    data: bytes = b""
    marker: bytes = b""


Talk = ReplicaBegin | ReplicaBytes | ReplicaMark | ReplicaRequest | ReplicaAnswer
_CODEC: Codec[Talk] = Codec(Talk)  # type: ignore[arg-type]  # a union is no type[M]


class ReplicaServer(AnswerServer[Talk]):
    """A server that stores states of other nodes' ranks, and returns stored states on request.

    Args:
        directory: the directory of the slot files.
        node: the node of this server.
        post: receives the list of the stored states after each change, in a thread of the server.
    """

    def __init__(
        self, directory: Path, secret: Secret, node: NodeId, post: Callable[[HeldStates], None]
    ) -> None:
        super().__init__(_CODEC, secret, memory_of(node))
        self._directory = directory
        self._node = node
        self._post = post
        self._held: dict[str, tuple[int, ...]] = {}
        self._incoming: dict[int, Incoming] = {}
        self._newest: dict[int, int] = {}  # by rank: the newest generation that sent a state
        self._lock = threading.Lock()

    def _answer(self, message: Talk) -> tuple[Talk, Sequence[memoryview]]:
        try:
            with self._lock:
                return self._do(message), ()
        except (StateError, CheckpointInvalid, OSError):
            return ReplicaAnswer(), ()

    def _do(self, message: Talk) -> Talk:
        match message:
            case ReplicaBegin() if message.generation < self._newest.get(message.rank, 0):
                return ReplicaAnswer()  # from a lost node that is back: another process has this rank now
            case ReplicaBegin() if 0 <= message.rank and 0 < message.size_bytes <= SLOT_SIZE_BYTES_MAX:
                self._newest[message.rank] = message.generation
                self._incoming[message.rank] = Incoming.begin(
                    self._directory, message.rank, message.step, message.size_bytes
                )
            case ReplicaBytes() if message.rank in self._incoming:
                self._incoming[message.rank].write(message.start, message.data)
            case ReplicaMark() if message.rank in self._incoming:
                self._incoming.pop(message.rank).commit(message.data)
                with open_kept(self._directory, message.rank, message.step):
                    pass  # to open the slot verifies it
                self._held[str(message.rank)] = kept_steps(self._directory, message.rank, whole=True)
                self._post(HeldStates(node_id=self._node, ranks=dict(self._held)))
            case ReplicaRequest():
                size, marker, data = read_raw(
                    self._directory, message.rank, message.step, message.start, PIECE_SIZE_BYTES
                )
                return ReplicaAnswer(size, data, marker)
            case _:
                return ReplicaAnswer()
        return ReplicaAnswer(1)


def push(
    directory: Path,
    rank: int,
    step: int,
    node: str,
    to: Address,
    secret: Secret,
    generation: int = 0,
) -> int:
    """Send the state of ``rank`` at ``step`` to the agent of ``node``, which listens at ``to``.

    Args:
        generation: the generation of the process that kept the state, packed into one integer.

    Returns:
        The digest of the state if that agent has verified the state; otherwise 0.
    """
    try:
        line: BlockingChannel[Talk] = BlockingChannel.connect(_CODEC, to, secret, memory_of(node), ROLE)
    except (OSError, ProtocolError):
        return 0
    try:
        size, marker, data = read_raw(directory, rank, step, 0, PIECE_SIZE_BYTES)
        good = _asked(line, ReplicaBegin(rank, step, size, generation)).size_bytes > 0
        start = 0
        while good and data:
            good = _asked(line, ReplicaBytes(rank, start, data)).size_bytes > 0
            start += len(data)
            data = read_raw(directory, rank, step, start, PIECE_SIZE_BYTES)[2]
        good = good and _asked(line, ReplicaMark(rank, step, marker)).size_bytes > 0
        return digest_of(marker) if good else 0
    except (OSError, ProtocolError, CheckpointInvalid):
        return 0  # the buddy is gone, or the rank has kept newer states in the meantime
    finally:
        line.close()


def pull(directory: Path, rank: int, step: int, peers: Mapping[str, Address], secret: Secret) -> bool:
    """Fetch the state of ``rank`` at ``step`` into ``directory``, from the first of ``peers`` that has the state.

    Return True if an agent had the state. The caller verifies its bytes.
    """
    for node, at in peers.items():
        try:
            line: BlockingChannel[Talk] = BlockingChannel.connect(_CODEC, at, secret, memory_of(node), ROLE)
        except (OSError, ProtocolError):
            continue
        try:
            answer = _asked(line, ReplicaRequest(rank, step, 0))
            if not 0 < answer.size_bytes <= SLOT_SIZE_BYTES_MAX:
                continue
            incoming, start = Incoming.begin(directory, rank, step, answer.size_bytes), 0
            while answer.data:
                incoming.write(start, answer.data)
                start += len(answer.data)
                answer = _asked(line, ReplicaRequest(rank, step, start))
            incoming.commit(answer.marker)
            return True
        except (OSError, ProtocolError, CheckpointInvalid, StateError):
            continue
        finally:
            line.close()
    return False


def _asked(line: BlockingChannel[Talk], question: Talk) -> ReplicaAnswer:
    line.send(question)
    answer = line.receive(ANSWER_S)
    if not isinstance(answer, ReplicaAnswer):
        raise ProtocolError("an agent answers nonsense")
    return answer


class PeerReplication:
    """The replication of one agent: it sends the states of its own ranks, and stores states of another node's ranks.

    Args:
        living: the members with a process on this node.
        connected: the connected agents of other nodes, by node.
        post: receives the list of the states that this node stores for other nodes.
    """

    def __init__(
        self,
        run: RunDir,
        settings: RunSettings,
        living: Collection[MemberId],
        connected: Mapping[NodeId, Peer],
        post: Callable[[ReplicationEvent], None],
    ) -> None:
        self._run = run
        self._settings = settings
        self._me = NodeId(settings.node)
        self._living = living
        self._connected = connected
        self._post = post
        self._directory = run.pages()
        self._secret = settings.secret_of(run)
        self._loop = asyncio.get_running_loop()
        self._server = ReplicaServer(self._directory, self._secret, self._me, self._stored)
        self._task: asyncio.Task[None] | None = None

    def begin(self) -> int:
        """Start the server and the sending of states. Return the port of the server."""
        port = self._server.start(Address(self._settings.bind)).port
        self._task = start_task(self._send_states(), self._post)
        return port

    def close(self) -> None:
        """Stop the server and the sending of states."""
        if self._task is not None:
            self._task.cancel()
        self._server.close()

    def _stored(self, held: HeldStates) -> None:
        """Post ``held``, the list of stored states, in the event loop. The server calls this in its own thread."""
        self._loop.call_soon_threadsafe(self._post, held)

    async def _send_states(self) -> None:
        """Send to the buddy each state that a rank of this node has kept, as soon as the state is whole."""
        while True:
            await asyncio.sleep(LOOK_S)
            for path in [self._run.page_path(member_id) for member_id in self._living]:
                await self._give(path)

    async def _give(self, path: Path) -> None:
        try:
            page = Page.open(path)
        except (OSError, ProtocolError):
            return  # the page was removed
        try:
            rank = page[Word.RANK]
            newest = Slots(self._directory, rank).newest(whole=True)
            if newest is None or page[Word.ARRIVED] == newest.digest:
                return
            buddy = self._buddy()
            arrived = newest.digest
            if buddy is not None:
                at, generation = Address(buddy.host, buddy.memory_port), page[Word.GENERATION]
                arrived = await asyncio.to_thread(
                    push, self._directory, rank, newest.step, buddy.node_id, at, self._secret, generation
                )
            if arrived:
                page[Word.ARRIVED] = arrived
        finally:
            page.close()

    def _buddy(self) -> Peer | None:
        """Return the connected agent of the next node in the order of names; None if no other node is connected.

        The first node follows the last one.
        """
        peers = {n: peer for n, peer in self._connected.items() if n != self._me and peer.memory_port}
        later = [node for node in sorted(peers) if node > self._me]
        order = [*later, *sorted(peers)]
        return peers[order[0]] if order else None


def puller(run: RunDir, me: str) -> Callable[[int, int], bool]:
    """Return a function ``get(rank, step)``, which a worker uses to fetch a state that another node has in memory.

    ``get`` returns True if another node had the state of this rank at this step.
    """

    def get(rank: int, step: int) -> bool:
        try:
            known = msgspec.json.decode(run.peers.read_bytes(), type=list[Peer])
        except (OSError, msgspec.MsgspecError):
            return False
        others = {
            str(p.node_id): Address(p.host, p.memory_port) for p in known if p.node_id != me and p.memory_port
        }
        return pull(run.pages(), rank, step, others, RunSettings.load(run.path).secret_of(run))

    return get
