"""Messages between agents, and the events and commands of an election.

Theory. Agents of one job are connected with each other, separately from their connection to the controller. Over these
connections they elect a leader, and serve each other's workers when a process group is built. These messages never
reach a worker.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from holdfast.core.ids import MemberId, NodeId
from holdfast.core.protocol.messages import Command, KvReply, KvRequest, Message

# ---------------------------------------------------------------- meeting


class Peer(msgspec.Struct, frozen=True):
    """The address of one agent for the others. ``home`` identifies its run directory, which a successor agent keeps."""

    node_id: NodeId
    home: str
    host: str
    port: int
    memory_port: int = 0  # port on which it receives and gives states that ranks keep in memory


VERSION_LENGTH_MAX = 64
VersionText = Annotated[str, msgspec.Meta(max_length=VERSION_LENGTH_MAX)]
Versions = Annotated[dict[VersionText, VersionText], msgspec.Meta(max_length=16)]


class PeerHello(Message, frozen=True):
    """First message on a connection between agents: sender, its settings, and the agents it knows.

    Attributes:
        peer: the sender.
        job: name of the job that the sender belongs to; empty: none.
        nodes: number of nodes.
        slots: workers of each node, or one number if all have as many.
        known: the agents that the sender knows.
        holdfast: version of the sender. An agent with another one does not belong to the job.
        versions: versions of other software that should be the same everywhere.
        near: name of the job that an agent connected to the sender belongs to; empty: none.
    """

    peer: Peer
    job: str
    nodes: int
    slots: tuple[int, ...]
    known: tuple[Peer, ...] = ()
    holdfast: VersionText = ""
    versions: Versions = msgspec.field(default_factory=dict)
    near: str = ""


class PeerList(Message, frozen=True):
    """The list of all agents that the sender knows, and the names of jobs. It is sent again when one of them changes.

    ``job`` and ``near`` are those of :class:`PeerHello`.
    """

    job: str
    known: tuple[Peer, ...]
    near: str = ""


class PeerRefused(Message, frozen=True):
    """Refusal of an agent that does not fit the job: another node number, number of workers, or version."""

    reason: str


class KvForward(Message, frozen=True):
    """A key-value request of a worker, for the agent that has the key space of its generation.

    ``attempt``: number of the start of all workers that the request belongs to.
    """

    member_id: MemberId
    request: KvRequest
    attempt: int


class KvBack(Message, frozen=True):
    """The answer to :class:`KvForward`."""

    member_id: MemberId
    reply: KvReply


# ---------------------------------------------------------------- voting


class VoterSet(msgspec.Struct, frozen=True, order=True):
    """The agents that elect the controller. Sets are totally ordered by (term that issued it, number of the change)."""

    term: int
    number: int
    voters: tuple[NodeId, ...]
    witness: bool = False  # a lease object in the checkpoint root decides between two voters

    @property
    def quorum(self) -> int:
        """The number of votes that elect."""
        return len(self.voters) // 2 + 1


class RequestVote(Message, frozen=True):
    """Request of an agent that wants to lead in ``term``.

    A ``trial`` only asks for the likely answer and binds no voter.

    Attributes:
        log: (term, number) of the newest line of a controller in the event log of the candidate's node.
    """

    candidate: NodeId
    term: int
    electorate: VoterSet
    trial: bool
    log: tuple[int, int] = (0, 0)


class VoteReply(Message, frozen=True):
    """Answer to :class:`RequestVote`. If granted, ``term`` is the requested one; if refused, the voter's own.

    ``blank``: the voter knows no electorate. Its host may have been installed again, and its earlier votes are lost.
    """

    voter: NodeId
    term: int
    trial: bool
    granted: bool
    blank: bool = False


class Lead(Message, frozen=True):
    """The leader and the address of its controller."""

    leader: NodeId
    term: int
    host: str
    port: int


class ConfigChange(Message, frozen=True):
    """Message of the leader of ``term`` that changes the electorate. ``committed``: enough voters keep the change."""

    leader: NodeId
    term: int
    electorate: VoterSet
    committed: bool


class ConfigChangeAck(Message, frozen=True):
    """Report of a voter that it keeps this electorate."""

    voter: NodeId
    electorate: VoterSet


# ---------------------------------------------------------------- events of an election, made by its driver


class JobFormed(Message, frozen=True):
    """Event for an agent: the agents of the job have met. From now on they leave together."""


class Founded(Message, frozen=True):
    """Event for an election: the first agents have met. They are the voters."""

    voters: tuple[NodeId, ...]
    witness: bool


class LeaderLost(Message, frozen=True):
    """Event for an election: the connection to the controller closed or is silent."""


class LogHeld(Message, frozen=True):
    """The newest line of a controller in the event log of this node (event for an election)."""

    term: int
    number: int


class ControllerUp(Message, frozen=True):
    """Event for an election: the controller of ``term`` listens on this node."""

    term: int
    host: str
    port: int


class PeerHere(Message, frozen=True):
    """Event for an election: a connection to another agent is up."""

    node_id: NodeId


class WitnessReply(Message, frozen=True):
    """Answer of the witness: the voters that it has recorded for change ``number``; empty: it cannot be reached."""

    number: int
    voters: tuple[NodeId, ...]


# ---------------------------------------------------------------- commands of an election


class PersistHardState(Command, frozen=True):
    """Command of an election: write this to disk before the next command is executed."""

    term: int
    voted_for: str
    electorate: VoterSet | None
    committed: bool


class StartController(Command, frozen=True):
    """Command after a won election: start the controller of ``term``."""

    term: int


class Follow(Command, frozen=True):
    """Command to connect to the controller of ``lead``."""

    lead: Lead


class StepDown(Command, frozen=True):
    """Command to end the controller of this agent: it is no longer the leader."""

    reason: str


class Claim(Command, frozen=True):
    """Command to ask the witness for change ``number`` of the electorate. The answer is :class:`WitnessReply`."""

    number: int
    voters: tuple[NodeId, ...]


class GiveUp(Command, frozen=True):
    """Command to seal the newest step that all ranks have committed, and leave: no majority can be reached."""

    reason: str


PeerMessage = (
    PeerHello
    | PeerList
    | PeerRefused
    | KvForward
    | KvBack
    | RequestVote
    | VoteReply
    | Lead
    | ConfigChange
    | ConfigChangeAck
)
"""All messages that travel between agents."""
