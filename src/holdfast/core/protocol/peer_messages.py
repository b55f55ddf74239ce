"""What agents say to each other, and what an election hears and orders.

Theory. Agents of one job meet on a line of their own, beside the one to the controller: they agree on who leads, and
they serve each other's workers when a process group is built. These messages never reach a worker.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from holdfast.core.ids import MemberId, NodeId
from holdfast.core.protocol.messages import Command, KvReply, KvRequest, Message

# ---------------------------------------------------------------- meeting


class Peer(msgspec.Struct, frozen=True):
    """Where one agent can be reached by the others. ``home`` names its run directory: a successor keeps it."""

    node_id: NodeId
    home: str
    host: str
    port: int
    memory_port: int = 0  # where it takes and gives states that ranks keep in memory


VERSION_LENGTH_MAX = 64
VersionText = Annotated[str, msgspec.Meta(max_length=VERSION_LENGTH_MAX)]
Versions = Annotated[dict[VersionText, VersionText], msgspec.Meta(max_length=16)]


class PeerHello(Message, frozen=True):
    """First message on a line between agents: who I am, what I was started with, and whom I know.

    Attributes:
        slots: workers of each node, or one number where all have as many.
        holdfast: my version; an agent with another one does not belong to the job.
        versions: of what else should be the same everywhere.
    """

    peer: Peer
    job: str
    nodes: int
    slots: tuple[int, ...]
    known: tuple[Peer, ...] = ()
    holdfast: VersionText = ""
    versions: Versions = msgspec.field(default_factory=dict)


class PeerList(Message, frozen=True):
    """Everyone I know, and the name of the job; told again when it grows."""

    job: str
    known: tuple[Peer, ...]


class PeerRefused(Message, frozen=True):
    """You do not belong here: another node number, number of workers, or version."""

    reason: str


class KvForward(Message, frozen=True):
    """A key-value request of a worker, for the agent that owns the key space of its generation; ``attempt``: which
    start of all workers it belongs to."""

    member_id: MemberId
    request: KvRequest
    attempt: int


class KvBack(Message, frozen=True):
    """The answer to :class:`KvForward`."""

    member_id: MemberId
    reply: KvReply


# ---------------------------------------------------------------- voting


class VoterSet(msgspec.Struct, frozen=True, order=True):
    """Who elects the controller. Totally ordered by (term that issued it, number of the change)."""

    term: int
    number: int
    voters: tuple[NodeId, ...]
    witness: bool = False  # a lease object in the checkpoint root decides between two voters

    @property
    def quorum(self) -> int:
        """Votes that elect."""
        return len(self.voters) // 2 + 1


class RequestVote(Message, frozen=True):
    """An agent wants to lead in ``term``. A ``trial`` asks only whether it would be elected: it binds no voter.

    Attributes:
        log: (term, number) of the newest line of a controller in the event log of the candidate's node.
    """

    candidate: NodeId
    term: int
    electorate: VoterSet
    trial: bool
    log: tuple[int, int] = (0, 0)


class VoteReply(Message, frozen=True):
    """Answer to :class:`RequestVote`. Granted: ``term`` is the asked one; refused: the voter's own."""

    voter: NodeId
    term: int
    trial: bool
    granted: bool


class Lead(Message, frozen=True):
    """Who leads, and where its controller listens."""

    leader: NodeId
    term: int
    host: str
    port: int


class ConfigChange(Message, frozen=True):
    """The leader of ``term`` changes the electorate; ``committed`` once enough voters keep it."""

    leader: NodeId
    term: int
    electorate: VoterSet
    committed: bool


class ConfigChangeAck(Message, frozen=True):
    """A voter keeps this electorate."""

    voter: NodeId
    electorate: VoterSet


# ---------------------------------------------------------------- events of an election, made by its driver


class JobFormed(Message, frozen=True):
    """The agents have met: from now on they leave together (event for an agent)."""


class Founded(Message, frozen=True):
    """The first agents have met (event for an election): they are the voters."""

    voters: tuple[NodeId, ...]
    witness: bool


class LeaderLost(Message, frozen=True):
    """The line to the controller is gone, or silent (event for an election)."""


class LogHeld(Message, frozen=True):
    """The newest line of a controller in the event log of this node (event for an election)."""

    term: int
    number: int


class ControllerUp(Message, frozen=True):
    """The controller of ``term`` listens on this node (event for an election)."""

    term: int
    host: str
    port: int


class PeerHere(Message, frozen=True):
    """A line to another agent is up (event for an election)."""

    node_id: NodeId


class WitnessReply(Message, frozen=True):
    """Who holds change ``number`` of the electorate at the witness; nobody: it cannot be reached."""

    number: int
    voters: tuple[NodeId, ...]


# ---------------------------------------------------------------- commands of an election


class PersistHardState(Command, frozen=True):
    """Election: this is on the disk before the next command is carried out."""

    term: int
    voted_for: str
    electorate: VoterSet | None
    committed: bool


class StartController(Command, frozen=True):
    """Election won: start the controller of ``term``."""

    term: int


class Follow(Command, frozen=True):
    """Connect to the controller of ``lead``."""

    lead: Lead


class StepDown(Command, frozen=True):
    """Not the leader any more: end the controller of this agent."""

    reason: str


class Claim(Command, frozen=True):
    """Ask the witness for change ``number`` of the electorate; its answer is :class:`WitnessReply`."""

    number: int
    voters: tuple[NodeId, ...]


class GiveUp(Command, frozen=True):
    """No majority can be reached: seal what the whole generation has committed, and leave."""

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
"""All that travels between agents."""
