"""Messages between agents, and the events and commands of an election.

Theory. Agents of one job are connected with each other, separately from their connection to the controller. Over these
connections they elect a leader, and forward the requests of workers to the key-value store with which process groups
are built. These messages never reach a worker.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from holdfast.core.ids import MemberId, NodeId
from holdfast.core.protocol.messages import Command, KvReply, KvRequest, Message

# ---------------------------------------------------------------- meeting


class Peer(msgspec.Struct, frozen=True):
    """The address of one agent for the other agents.

    ``home`` identifies its run directory, which a successor agent keeps.
    """

    node_id: NodeId
    home: str
    host: str
    port: int
    memory_port: int = 0  # port on which it receives and gives states that ranks keep in memory


VERSION_LENGTH_MAX = 64
VersionText = Annotated[str, msgspec.Meta(max_length=VERSION_LENGTH_MAX)]
Versions = Annotated[dict[VersionText, VersionText], msgspec.Meta(max_length=16)]


class PeerHello(Message, frozen=True):
    """First message on a connection between agents: the sender, its settings, and the agents that it knows.

    Attributes:
        peer: the sender.
        job: name of the job that the sender belongs to; empty without a job.
        nodes: number of nodes of the job, as the sender is configured.
        slots: number of workers of each node, or a single number if it is equal for all nodes.
        known: the agents that the sender knows.
        holdfast: version of Holdfast of the sender. An agent with another version cannot join the job.
        versions: versions of other software that should be the same everywhere.
        near: name of the job that an agent connected to the sender belongs to; empty if there is no such job.
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
    """The list of all agents that the sender knows, and the names of its jobs. It is sent again after each change.

    ``job``: the job that the sender belongs to. ``near``: the job that a connected agent belongs to. An empty name
    means no job.
    """

    job: str
    known: tuple[Peer, ...]
    near: str = ""


class PeerRefused(Message, frozen=True):
    """Refusal of an agent that does not fit the job: another number of nodes, number of workers, or version."""

    reason: str


class KvForward(Message, frozen=True):
    """A key-value request of a worker, for the agent that has the key space of the worker's generation.

    ``attempt``: number of the start of all workers that the request belongs to.
    """

    member_id: MemberId
    request: KvRequest
    attempt: int


class KvBack(Message, frozen=True):
    """Answer to :class:`KvForward`, for the worker ``member_id``."""

    member_id: MemberId
    reply: KvReply


# ---------------------------------------------------------------- voting


class VoterSet(msgspec.Struct, frozen=True, order=True):
    """The agents that elect the controller.

    Voter sets are totally ordered by (term that issued the set, its number).
    """

    term: int
    number: int
    voters: tuple[NodeId, ...]
    witness: bool = False  # an object in the checkpoint root decides which of two voters continues

    @property
    def quorum(self) -> int:
        """The number of votes that elect a leader."""
        return len(self.voters) // 2 + 1


class RequestVote(Message, frozen=True):
    """Request of an agent for a vote, because it wants to lead in ``term``.

    With ``trial`` it asks only how the voter would answer, which binds no voter.

    Attributes:
        log: (term, number) of the newest record of a controller in the event log of the candidate's node.
    """

    candidate: NodeId
    term: int
    electorate: VoterSet
    trial: bool
    log: tuple[int, int] = (0, 0)


class VoteReply(Message, frozen=True):
    """Answer to :class:`RequestVote`. ``term`` is the requested one if ``granted``, otherwise the term of the voter.

    ``blank``: the voter knows no electorate. Its host may have been installed again, and its earlier votes are then
    lost.
    """

    voter: NodeId
    term: int
    trial: bool
    granted: bool
    blank: bool = False


class Lead(Message, frozen=True):
    """Message that names the leader of ``term`` and the address of its controller."""

    leader: NodeId
    term: int
    host: str
    port: int


class ConfigChange(Message, frozen=True):
    """Message of the leader of ``term`` that changes the electorate.

    ``committed``: enough voters have stored the change.
    """

    leader: NodeId
    term: int
    electorate: VoterSet
    committed: bool


class ConfigChangeAck(Message, frozen=True):
    """Report of a voter that it has stored this electorate."""

    voter: NodeId
    electorate: VoterSet


# ---------------------------------------------------------------- events of an election, made by its driver


class JobFormed(Message, frozen=True):
    """Event for an agent: the agents of the job have met. From now on this agent does not leave on its own."""


class Founded(Message, frozen=True):
    """Event for an election: the first agents have met and are the voters."""

    voters: tuple[NodeId, ...]
    witness: bool


class LeaderLost(Message, frozen=True):
    """Event for an election: the connection to the controller was closed, or the controller is silent."""


class LogHeld(Message, frozen=True):
    """Event for an election: (term, number) of the newest record of a controller in the event log of this node."""

    term: int
    number: int


class ControllerUp(Message, frozen=True):
    """Event for an election: the controller of ``term`` listens on this node."""

    term: int
    host: str
    port: int


class PeerHere(Message, frozen=True):
    """Event for an election: this agent is connected to another agent."""

    node_id: NodeId


class WitnessReply(Message, frozen=True):
    """Answer of the witness: the voters that it has recorded for change ``number``.

    Empty if the witness cannot be reached.
    """

    number: int
    voters: tuple[NodeId, ...]


# ---------------------------------------------------------------- commands of an election


class PersistHardState(Command, frozen=True):
    """Command of an election: write this state to disk before the next command is executed."""

    term: int
    voted_for: str
    electorate: VoterSet | None
    committed: bool


class StartController(Command, frozen=True):
    """Command of an election that this agent has won: start the controller of ``term``."""

    term: int


class Follow(Command, frozen=True):
    """Command to connect to the controller whose address is in ``lead``."""

    lead: Lead


class StepDown(Command, frozen=True):
    """Command to end the controller of this agent, because the agent is no longer the leader."""

    reason: str


class Claim(Command, frozen=True):
    """Command to propose ``voters`` to the witness for change ``number`` of the electorate.

    The witness answers with WitnessReply.
    """

    number: int
    voters: tuple[NodeId, ...]


class GiveUp(Command, frozen=True):
    """Command to seal the newest step that all ranks have committed, and to leave: no majority can be reached."""

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
"""All messages that are sent between agents."""
