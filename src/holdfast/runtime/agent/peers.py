"""The connections of one agent to all other agents of its job, and a table of the agents and their addresses.

An agent gets one or more contacts, which are addresses of other agents (``--master-addr`` is one of them). It dials the
contacts until an agent answers, and then every agent that it knows. It keeps the addresses of all known agents in
``peers.json``, so an agent that has joined a job needs no contact.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import msgspec

from holdfast.core.ids import RUN_ID_LENGTH_MAX, NodeId, is_run_id
from holdfast.core.job.membership import node_order
from holdfast.core.meeting import Meeting
from holdfast.core.protocol.peer_messages import (
    VERSION_LENGTH_MAX,
    Peer,
    PeerHello,
    PeerHere,
    PeerList,
    PeerMessage,
    PeerRefused,
)
from holdfast.errors import AuthError, ProtocolError, UsageError
from holdfast.event_log import EventSink
from holdfast.runtime.agent.agent_events import FromPeer, PeersEvent, TurnedAway, start_task
from holdfast.runtime.net.addresses import Address, split_endpoint
from holdfast.runtime.net.channel import Channel, Hub
from holdfast.runtime.net.service_names import PEERS
from holdfast.runtime.node.env_record import alike
from holdfast.runtime.node.run_settings import RunSettings, shape
from holdfast.runtime.node.rundir import RunDir, write_private
from holdfast.text import plural
from holdfast.version import VERSION
from holdfast.wire import SAME_VERSION, Codec

DIAL_S = 0.3
GATHER_S = 2.0  # wait for spare nodes, as soon as there are enough nodes for the ranks
DIAL_TIMEOUT_S = 2.0
NEIGHBOUR_S = 5.0  # an agent on this host answers within this time, even if the host is busy
REFUSED_S = 10.0  # pause between two dials to an address that refuses this agent
PEER_MESSAGES: Codec[PeerMessage] = Codec(PeerMessage)  # type: ignore[arg-type]  # a union is no type[M]


class Peers:
    """The connections to all other agents of the job, and the table of these agents.

    Args:
        post: receives the messages of the other agents, ``PeerHere`` for each new connection, and ``TurnedAway`` if
            another agent refuses this agent.
        job: the job that this agent belongs to; empty if it belongs to none.

    Attributes:
        meeting: the names of the jobs to which this agent and the connected agents belong.
        connected: the connected agents, by node.
    """

    def __init__(
        self,
        run: RunDir,
        settings: RunSettings,
        journal: EventSink,
        post: Callable[[PeersEvent], None],
        job: str = "",
    ) -> None:
        self.me = NodeId(settings.node)
        self.meeting = Meeting(job, settings.nnodes, settings.nnodes_max, GATHER_S)
        self.known: dict[NodeId, Peer] = {}
        self.connected: dict[NodeId, Peer] = {}
        self._run = run
        self._settings = settings
        self._journal = journal
        self._post = post
        self._home = str(run.path)
        self.memory_port = 0  # port of this agent's server for states in memory
        self._lines: dict[NodeId, Channel[PeerMessage]] = {}
        self._node_of: dict[Channel[PeerMessage], NodeId] = {}
        self._refused: dict[Address, float] = {}  # by address: the time of the next dial
        self._unreached: dict[Address, str] = {}  # by address: why the last dial failed
        self._sent_away: dict[NodeId, str] = {}  # by node: why this agent refused its agent
        # If the workers have another interpreter, the versions of its packages are not known here.
        self._versions = {} if settings.python else {n: v[:VERSION_LENGTH_MAX] for n, v in alike().items()}
        self._told: set[tuple[str, str]] = set()  # (package, version) of other nodes, logged already
        self._server: asyncio.Server | None = None
        self._task: asyncio.Task[None] | None = None
        self._hub: Hub[PeerMessage] = Hub(
            PEER_MESSAGES,
            settings.secret_of(run),
            on_open=self._greet,
            on_message=self._heard,
            on_close=self._closed,
        )

    async def listen(self) -> Peer:
        """Listen at the first port that is free, and return this agent's entry in the table of agents.

        The ports are tried in this order: the port of an earlier agent of this node, the ports of the contacts, any
        port.

        Raises:
            OSError: the address to listen at is not one of this host.
            UsageError: another program listens at the first contact, where the other agents expect this host.
        """
        try:
            self.known = {peer.node_id: peer for peer in read_peers(self._run)}
        except (OSError, msgspec.MsgspecError):
            self.known = {}
        before = self.known.get(self.me)
        ports = [before.port] if before is not None else []
        contacts = [split_endpoint(contact) for contact in self._settings.contacts]
        ports += [port for _, port in contacts]
        for port in (*ports, 0):
            try:
                self._server, own = await self._hub.listen(PEERS, Address(self._settings.bind, port))
                break
            except OSError:
                if port == 0:
                    raise
        peer = self.known[self.me] = Peer(self.me, self._home, *own, self.memory_port)
        for first in self._first:
            if not self.job and first.host == own.host and first.port != own.port:
                await self._check_neighbour(first)
        return peer

    async def _check_neighbour(self, first: Address) -> None:
        """Check that an agent of the job listens at ``first``.

        ``first`` is the first contact. Its address belongs to this host, but this agent does not listen there.

        Raises:
            UsageError: another program or the agent of another run listens there.
        """
        try:
            async with asyncio.timeout(NEIGHBOUR_S):
                await self._hub.connect(first, PEERS, "peer")
        except (OSError, ProtocolError) as error:
            run = isinstance(error, AuthError)
            raise UsageError(
                f"the others look for this host at {first}, where another "
                f"{'run listens, or this run with another token' if run else 'program listens'}",
                hint="end it, or another --master-port, the same on every host",
            ) from None

    def founds(self) -> bool:
        """Return True if this agent names the first voters, because it listens at the first contact.

        If several known agents listen at addresses of the first contact, the one with the first node name does it.
        """
        owners = (n for n, peer in self.known.items() if _at(peer) in self._first)
        return min(owners, key=node_order, default=None) == self.me

    @property
    def _first(self) -> list[Address]:
        """The addresses of the first contact. A host name that several hosts have gives one address for each host."""
        first = self._settings.contacts[: self._settings.first_contacts]
        return [split_endpoint(contact) for contact in first]

    def begin(self) -> None:
        """Start to dial, periodically, all known agents that are not connected."""
        self._task = start_task(self._dial(), self._post)

    @property
    def job(self) -> str:
        """The job that this agent belongs to; empty if it belongs to none."""
        return self.meeting.job

    def join(self, job: str) -> None:
        """Record that this agent belongs to a job, and send the name of the job to all connected agents."""
        self.meeting.join(job)
        self._publish()

    def send(self, to: NodeId, message: PeerMessage) -> bool:
        """Send a message to one agent. If it is not connected, return False; the caller has to repeat the message."""
        line = self._lines.get(to)
        return line is not None and line.send(message)

    def broadcast(self, message: PeerMessage) -> None:
        """Send a message to all connected agents."""
        for line in self._lines.values():
            line.send(message)

    @property
    def here(self) -> list[NodeId]:
        """The names of this node and of all nodes with a connection."""
        return [self.me, *self._lines]

    async def end(self) -> None:
        """Stop dialling, and close all connections."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        if self._server is not None:
            self._server.close()
        await self._hub.close(DIAL_TIMEOUT_S)

    async def _dial(self) -> None:
        own = {_at(self.known[self.me])}
        while True:
            targets = {_at(p) for n, p in self.known.items() if n not in self._lines}
            if len(self.known) == 1 or not self.job:
                reached = {_at(p) for n, p in self.known.items() if n in self._lines}
                targets |= {split_endpoint(contact) for contact in self._settings.contacts} - reached
            shut = {address for address, until_s in self._refused.items() if until_s > time.monotonic()}
            await asyncio.gather(*(self._connect(at) for at in targets - own - shut))
            await asyncio.sleep(DIAL_S)

    async def _connect(self, at: Address) -> None:
        try:
            async with asyncio.timeout(DIAL_TIMEOUT_S):
                await self._hub.connect(at, PEERS, "peer")
        except AuthError as error:
            self._turned_away(at, f"{error.message} ({at})\n  next: {error.hint}")
        except (OSError, ProtocolError) as error:  # that agent is not up yet, or gone: it is dialled again
            self._unreached[at] = _why(error)
        else:
            self._unreached.pop(at, None)

    def _turned_away(self, address: Address, reason: str) -> None:
        if not (self.job or self.meeting.elsewhere):
            self._post(TurnedAway(reason))
            return
        if address not in self._refused:
            self._journal.append(
                "peer_foreign", {"host": address.host, "port": address.port, "reason": reason}
            )
        self._refused[address] = time.monotonic() + REFUSED_S

    @property
    def trouble(self) -> str:
        """Text on why agents may not have met: failed dials, connections with another token, refused nodes."""
        said = [f"{at}: {why}" for at, why in sorted(self._unreached.items())]
        if count := self._hub.refused["token"]:
            said.append(
                f"{plural(count, 'connection')} with another token {'was' if count == 1 else 'were'} refused"
            )
        said += [why for _, why in sorted(self._sent_away.items())]
        return "".join(f"; {each}" for each in said)

    def _greet(self, channel: Channel[PeerMessage]) -> None:
        settings, known = self._settings, tuple(self.known.values())
        hello = PeerHello(
            peer=self.known[self.me], job=self.job, nodes=settings.nnodes, slots=settings.counts, known=known,
            holdfast=VERSION, versions=self._versions, near=self.meeting.near,
        )  # fmt: skip
        channel.send(hello)

    def _heard(self, channel: Channel[PeerMessage], message: PeerMessage) -> None:
        node_id = self._node_of.get(channel)
        if isinstance(message, PeerRefused):
            self._turned_away(channel.address, message.reason)
        elif isinstance(message, PeerHello):
            self._welcome(channel, message)
        elif node_id is None:
            channel.close()
        elif isinstance(message, PeerList):
            if not all(is_run_id(name) for name in (message.job, message.near) if name):
                channel.close()  # the name would become a part of paths
                return
            self._learn(node_id, message)
        else:
            self._post(FromPeer(node_id, message))

    def _welcome(self, channel: Channel[PeerMessage], hello: PeerHello) -> None:
        peer = hello.peer
        why = self._unfit(hello)
        if why and not channel.peer_role:
            return  # this agent dialled, so the other agent decides
        if why:
            self._journal.append("peer_refused", {"node": peer.node_id, "home": peer.home, "reason": why})
            self._sent_away[peer.node_id] = why.partition("\n")[0]
            channel.send(PeerRefused(reason=why))
            channel.close()
            return
        self._node_of[channel] = peer.node_id
        self._refused.pop(_at(peer), None)
        self._sent_away.pop(peer.node_id, None)
        self._compare(hello)
        before = self._lines.get(peer.node_id)
        if before is not channel and before is not None:
            channel = self._choose(peer.node_id, before, channel)
        self._lines[peer.node_id] = channel
        self._repeat_job(channel)
        if before is None:
            self._journal.append("peer_here", {"node": peer.node_id, "host": peer.host, "port": peer.port})
        self._learn(peer.node_id, hello, said_by=peer)
        self.connected[peer.node_id] = self.known[peer.node_id]
        self._post(PeerHere(node_id=peer.node_id))

    def _choose(
        self, node_id: NodeId, older: Channel[PeerMessage], newer: Channel[PeerMessage]
    ) -> Channel[PeerMessage]:
        """Return the connection to use when two lead to the same agent. Close the other one if this side has to.

        If one side dialled twice, it has lost its first connection, and the newer connection stays. If both sides
        dialled, the connection that the node with the smaller name dialled stays. The node with the larger name closes
        the other connection. The node with the smaller name does not, because it cannot know whether its own connection
        is still up at the other end.
        """
        if bool(older.peer_role) != bool(newer.peer_role):
            if self.me < node_id:
                return newer
            older, newer = (older, newer) if newer.peer_role else (newer, older)
        older.close()
        return newer

    def _compare(self, hello: PeerHello) -> None:
        """Log each package whose version on another node differs from this node's, once per version.

        Such differences are tolerated.
        """
        for name in sorted(self._versions.keys() & hello.versions.keys()):
            here, there = self._versions[name], hello.versions[name]
            if here != there and (name, there) not in self._told:
                self._told.add((name, there))
                data = {"node": hello.peer.node_id, "what": name, "here": here, "there": there}
                self._journal.append("versions_differ", data)

    def _unfit(self, hello: PeerHello) -> str:
        settings, peer = self._settings, hello.peer
        if hello.holdfast != VERSION:
            return (
                f"{peer.node_id} has holdfast {hello.holdfast or 'of a version that it does not say'}, "
                f"{self.me} has {VERSION}\n  next: {SAME_VERSION}"
            )
        if (hello.nodes, hello.slots) != (settings.nnodes, settings.counts):
            return (
                f"{peer.node_id} was started for {shape(hello.nodes, hello.slots)}, "
                f"{self.me} for {shape(settings.nnodes, settings.counts)}"
                "\n  next: the same --nnodes and --nproc-per-node on every host; where they differ in size the list "
                "of all, --nproc-per-node 8,4"
            )
        for name in filter(None, (hello.job, hello.near)):
            if not is_run_id(name):
                return f"{peer.node_id} says that the job is {name[:RUN_ID_LENGTH_MAX]!r}, which is no name of a run"
        if self.job and hello.job and self.job != hello.job:
            return (
                f"{peer.node_id} belongs to the job {hello.job}, {self.me} to {self.job}"
                "\n  next: another --master-port for each job"
            )
        known = self.known.get(peer.node_id)
        twice = known is not None and known.home != peer.home and peer.node_id in (self.me, *self._lines)
        if not twice:
            return ""
        return f"there is a {peer.node_id} already\n  next: give each host a --node-rank of its own"

    def _learn(self, node_id: NodeId, said: PeerHello | PeerList, said_by: Peer | None = None) -> None:
        """Record the unknown agents and the names of jobs that a message of another agent contains.

        The address of a known agent is updated only if that agent sent the message.
        """
        changed = self.meeting.told(node_id, said.job, said.near)
        for peer in (*said.known, *([said_by] if said_by is not None else [])):
            if peer.node_id == self.me:
                continue
            if peer.node_id not in self.known or (peer == said_by and self.known[peer.node_id] != peer):
                self.known[peer.node_id] = peer
                changed = True
        if changed:
            self._publish()

    def _publish(self) -> None:
        known = tuple(self.known.values())
        write_private(self._run.peers, msgspec.json.encode(known))
        self.broadcast(PeerList(job=self.job, known=known, near=self.meeting.near))

    def _repeat_job(self, channel: Channel[PeerMessage]) -> None:
        """Send the known names of jobs on ``channel``, the connection that is used from now on.

        A name that became known after the greeting on ``channel`` may have been sent only on another connection, which
        is now lost.
        """
        if self.job or self.meeting.near:
            known = tuple(self.known.values())
            channel.send(PeerList(job=self.job, known=known, near=self.meeting.near))

    def _closed(self, channel: Channel[PeerMessage]) -> None:
        node_id = self._node_of.pop(channel, None)
        if node_id is None or self._lines.get(node_id) is not channel:
            return
        rest = next((line for line, node in self._node_of.items() if node == node_id), None)
        if rest is None:
            del self._lines[node_id], self.connected[node_id]
            self._journal.append("peer_gone", {"node": node_id})
            if self.meeting.gone(node_id):
                self._publish()
        else:
            self._lines[node_id] = rest
            self._repeat_job(rest)
            self._post(PeerHere(node_id=node_id))  # lost messages of the closed connection are sent again


def _at(peer: Peer) -> Address:
    return Address(peer.host, peer.port)


def read_peers(run: RunDir) -> list[Peer]:
    """Return the table of agents that an agent of this node has saved. The table includes that agent.

    Raises: OSError, msgspec.MsgspecError.
    """
    return msgspec.json.decode(run.peers.read_bytes(), type=list[Peer])


def _why(error: Exception) -> str:
    """Return the reason of a failed dial, in a few words."""
    if isinstance(error, TimeoutError):
        return "no answer"
    if isinstance(error, ConnectionRefusedError):
        return "no process listens there"
    return str(error)
