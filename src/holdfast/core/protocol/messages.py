"""The messages of the control plane: the wire format and the machines' vocabulary (with ``health_messages.py``).

Theory. Workers talk to the agent of their node; the agent forwards to the controller what carries a ``member_id`` and
routes back what names one. Tensors never pass here. All structs are tagged msgspec structs, encoded as msgpack on the
wire and as JSON in the event log; unknown fields are ignored, wrong types are refused with their path.

Invariants:
1. Every message about a generation carries it; one function (``membership.is_stale``) refuses older ones.
2. A command is idempotent by (generation, content): it may be delivered twice.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from holdfast.core.ids import Generation, LayoutVersion, MemberId, NodeId, SaveId
from holdfast.core.protocol.layout_messages import Layout, Layouts

PROTOCOL_VERSION = 4
FRAME_SIZE_BYTES_MAX = 64 * 1024 * 1024
TEXT_SIZE_MAX = 64 * 1024

RankState = Literal[
    "starting", "ready", "compute", "voting", "updating", "aborted", "in_doubt", "torn", "finished"
]
"""State of the step protocol of one rank; with a step number it is, for instance, READY(s) = COMMITTED(s)."""


class Message(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Base of all messages; the tag is the class name."""


# ---------------------------------------------------------------- worker -> agent -> controller


class WorkerHello(Message, frozen=True):
    """First message of a worker, and again after it reconnected to a successor agent."""

    member_id: MemberId
    generation: Generation
    rank: int
    pid: int
    state: RankState = "starting"
    step: int = 0


class SessionOpened(Message, frozen=True):
    """A session exists and stands at ``step`` (resumed or fresh). ``root`` is where it saves, absolute, or empty."""

    member_id: MemberId
    generation: Generation
    step: int
    root: str = ""
    live: bool = False  # its collectives can be rebuilt in place: lost ranks may be replaced beside it


class LayoutPublished(Message, frozen=True):
    """What boxes this rank holds (``store.layouts.layout.RankLayout``); sent again when it changes.

    ``version`` names the vote after which all ranks tell theirs; NO_VERSION: this rank tells its own by itself.
    """

    member_id: MemberId
    generation: Generation
    rank: int
    version: LayoutVersion
    layout: Layout
    size_bytes: int = 0  # of the boxes that this rank holds; 0: not known


class FaultSeen(Message, frozen=True):
    """A collective broke here and nobody has told this rank of a fault yet."""

    member_id: MemberId
    generation: Generation
    step: int
    what: str


class WorkerFailed(Message, frozen=True):
    """User code raised: the process is about to exit. ``digest`` identifies type, text and place of the exception."""

    member_id: MemberId
    generation: Generation
    step: int
    kind: str
    what: str
    traceback: str
    digest: str
    user_error: bool = False  # a typed UserError/StoreError: retrying is pointless
    stays: bool = False  # its session keeps the process, and the state in it, until it is told to go
    between: bool = False  # two steps: no restart runs that code again at the same step


class Settled(Message, frozen=True):
    """Answer to :class:`Fence`: this rank will not change its state without a :class:`Settle`."""

    member_id: MemberId
    generation: Generation  # the new one, of the Fence
    state: RankState  # ready, aborted, in_doubt, torn or finished (starting: no session yet)
    step: int
    freed_ns: int = 0  # CLOCK_MONOTONIC when the process was out of its collectives
    away: bool = False  # its main thread is in a section between steps, or has left the loop by an exception
    kept: tuple[int, ...] = ()  # steps whose states of this rank are in memory, for the memory tier
    rewind: int = -1  # it can go back in place to a kept state of this step or later; -1: it cannot
    turns: int = 0  # of epochs and phases, that the whole job has done as far as this rank knows


class SaveReported(Message, frozen=True):
    """A part of a checkpoint is durable, or failed (``error``). ``sealed``: this rank saw every box covered."""

    member_id: MemberId
    generation: Generation
    save_id: SaveId
    sealed: bool
    size_bytes: int
    duration_s: float
    stall_s: float = 0.0
    error: str = ""
    delayed_steps: int = 0  # it was due so many steps earlier, when the save before was still being written


class StateOffered(Message, frozen=True):
    """This survivor stands at ``step`` and serves its state to newcomers at ``host:port``."""

    member_id: MemberId
    generation: Generation
    step: int
    host: str
    port: int


class StateRefused(Message, frozen=True):
    """The state of ``step`` that this rank has in memory does not fit its digest, and was dropped: decide again.

    ``alone``: it is sound, but no newcomer can get it beside the others: all have to start again.
    """

    member_id: MemberId
    generation: Generation
    step: int
    reason: str
    alone: bool = False


class JoinAsked(Message, frozen=True):
    """A newcomer has built its model without peers and asks for its state."""

    member_id: MemberId
    generation: Generation


class Joined(Message, frozen=True):
    """A newcomer holds the state of ``step``, verified and rehearsed: the job may resume."""

    member_id: MemberId
    generation: Generation
    step: int


class StepReached(Message, frozen=True):
    """First committed step of this rank in this generation (``resumed`` when all have reported)."""

    member_id: MemberId
    generation: Generation
    step: int


class ExitAsked(Message, frozen=True):
    """A worker was asked to exit gracefully (signal, file); ``source`` says by what."""

    member_id: MemberId
    generation: Generation
    source: str


class OnceAsked(Message, frozen=True):
    """The script asks for what its rank has made under ``name`` (``holdfast.once``), or tells what it has made.

    ``value`` is JSON; empty: it only asks. It may be said again.
    """

    member_id: MemberId
    name: str
    value: str = ""


class OnceTold(Message, frozen=True):
    """Answer to :class:`OnceAsked`: what is kept; empty: nothing yet. ``full``: no room for another name."""

    member_id: MemberId
    name: str
    value: str
    full: bool = False


class ExitAgreed(Message, frozen=True):
    """The vote of ``step`` carried the exit request: all ranks save ``step`` and leave."""

    member_id: MemberId
    generation: Generation
    step: int


class Finished(Message, frozen=True):
    """The session of this rank is done (``until`` reached or exit agreed) and waits for :class:`Release`."""

    member_id: MemberId
    generation: Generation
    step: int
    reason: Literal["done", "exit"]
    sealed: bool = False


# ---------------------------------------------------------------- controller -> agent -> worker


class Fence(Message, frozen=True):
    """Leave the old generation: get out of collectives, stop at the step boundary, answer :class:`Settled`."""

    member_id: MemberId
    generation: Generation  # the new one
    reason: str


class SaveShare(msgspec.Struct, frozen=True):
    """Write one copy of each box, planned over ``sources`` (ranks of the old generation that live and are sound)."""

    save_id: SaveId
    root: str
    sources: tuple[int, ...]
    layouts: Layouts  # of all ranks, the dead included
    dead_locals: dict[str, bytes]  # rank (text) -> JSON of rank-local values of the dead, from their pages


class Settle(Message, frozen=True):
    """The decision: the job stands at ``step``. In-doubt ranks of an earlier step apply their update first."""

    member_id: MemberId
    generation: Generation
    step: int
    save: SaveShare | None = None
    then: Literal["restart", "retry", "replace", "stop"] = "restart"
    rewind: int = -1  # all go back to the state of this step that each has in memory; -1: they stay
    vouch: bool = False  # tell layout and digests (``StateDigests``) before the state goes anywhere
    replays: bool = False  # as in ``Receive``: give the state only where the updates have made it
    turns: int = 0  # of epochs and phases, that the whole job has done


class Receive(Message, frozen=True):
    """To a newcomer: take the state of ``step`` from these ranks; ``layouts`` say who holds what."""

    member_id: MemberId
    generation: Generation
    step: int
    sources: dict[str, tuple[str, int]]  # rank (text) -> host, port
    layouts: Layouts
    version: LayoutVersion  # that all of these layouts were told under; NO_VERSION: there is none
    local: bytes = b""  # rank-local values of the one it replaces, from its page
    kept: bool = False  # take the state that the one before it left in memory, not the one of the sources
    replays: bool = False  # make what no source holds again, from a state and a log of updates in memory
    turns: int = 0  # of epochs and phases, that the job has done: another number in memory is refused


class ResumeInPlace(Message, frozen=True):
    """Go on in place: rebuild the groups in the new generation and run the step again."""

    member_id: MemberId
    generation: Generation
    step: int
    kv_node: str = ""  # as in StartMembers; agents read it on the way


class Leave(Message, frozen=True):
    """Exit now with ``code``."""

    member_id: MemberId
    generation: Generation
    code: int
    reason: str


class Release(Message, frozen=True):
    """Every rank has finished: the session may return."""

    member_id: MemberId
    generation: Generation


class ExitOrder(Message, frozen=True):
    """Raise (or with ``cancel`` take back) the exit flag in the next vote."""

    member_id: MemberId
    generation: Generation
    source: str
    cancel: bool = False


class Catalogued(Message, frozen=True):
    """All ranks published a layout under ``version``: here they are."""

    member_id: MemberId
    generation: Generation
    version: LayoutVersion
    layouts: Layouts


# ---------------------------------------------------------------- agent <-> controller


class MemberSeen(msgspec.Struct, frozen=True):
    """A worker that an agent holds when it (re)joins."""

    member_id: MemberId
    generation: Generation
    rank: int
    pid: int
    state: RankState
    step: int


class AgentHello(Message, frozen=True):
    """An agent joins (or rejoins after it or the controller was replaced) with what it holds."""

    node_id: NodeId
    slots: int
    pid: int
    members: tuple[MemberSeen, ...] = ()
    host: str = ""  # where processes of other nodes reach this one; empty: there are none
    port: int = 0  # a port that was free there, for MASTER_PORT
    clock_ns: int = 0  # CLOCK_MONOTONIC of the node when this was sent


class HeldStates(Message, frozen=True):
    """States of ranks of other nodes that this node has in memory: steps by rank (text)."""

    node_id: NodeId
    ranks: dict[str, tuple[int, ...]]


class AgentBeat(Message, frozen=True):
    """Heartbeat of an agent."""

    node_id: NodeId
    clock_ns: int = 0


class ControllerBeat(Message, frozen=True):
    """Heartbeat of the controller, to every agent."""

    term: int


class MirrorFrom(Message, frozen=True):
    """An agent with an event log of its own has the controller's lines up to this one."""

    node_id: NodeId
    term: int
    number: int


class Mirror(Message, frozen=True):
    """One line of the controller's log, for the logs of other nodes, sent before what acts on it."""

    term: int
    number: int
    kind: str
    data: bytes  # JSON


class Rolled(Message, frozen=True):
    """The nodes that the controller has not lost, for the election of its agent."""

    up: tuple[NodeId, ...]


class VotersAre(Message, frozen=True):
    """The electorate has changed: the loss of a node counts only while a majority of these is heard."""

    voters: tuple[NodeId, ...]


class MemberStarted(Message, frozen=True):
    """A worker process exists."""

    member_id: MemberId
    node_id: NodeId
    pid: int


class MemberExited(Message, frozen=True):
    """A worker process is gone. State, step and local values are read from its status page."""

    member_id: MemberId
    node_id: NodeId
    generation: Generation  # of its page
    code: int | None  # exit code; None when it was not our child
    signal: int | None
    state: RankState
    step: int
    detail: str = ""  # phase name on the page, e.g. "backward"
    locals: dict[int, bytes] = {}  # step -> rank-local values (JSON), of the newest steps
    died_ns: int = 0  # CLOCK_MONOTONIC when the agent saw it
    staged_step: int = 0  # newest step whose share its writer process had taken over; 0: none
    kept: tuple[int, ...] = ()  # steps whose states of its rank are in memory
    replays: tuple[
        int, ...
    ] = ()  # steps whose states can be made again from one of them and a log of updates
    log_size_bytes: int = 0  # of its log: what follows is a successor's; 0: not known
    oom_kills: int = (
        0  # so many processes of its node's control group were killed for want of memory meanwhile
    )


class Assignment(msgspec.Struct, frozen=True):
    """One process life to start."""

    member_id: MemberId
    rank: int
    local_rank: int


class StartMembers(Message, frozen=True):
    """Start these workers as generation ``generation``. ``resume`` names the save to load first, if one is known."""

    node_id: NodeId
    generation: Generation
    world_size: int
    attempt: int
    members: tuple[Assignment, ...]
    resume: str = ""  # directory name below the root
    restart_count: int = 0
    kv_node: str = ""  # whose agent owns the key space of the generation; empty: each its own
    master_host: str = ""  # the node of rank 0, for MASTER_ADDR; empty: the agent's own settings
    master_port: int = 0
    join: bool = False  # they replace lost ranks of a job whose other ranks live on
    places: tuple[tuple[NodeId, str], ...] = ()  # nodes by rank, and addresses; empty: one node


class KillMember(Message, frozen=True):
    """SIGKILL a worker (and its process group); with ``grace_s`` > 0 SIGTERM first. ``silent``: it has not answered in
    time; where it stands is told before, by ``Evidence``. ``given_up``: it was killed long ago and does not die (an
    uninterruptible wait): no code of it ever runs again, so what its page says is told as its end."""

    member_id: MemberId
    node_id: NodeId
    reason: str
    grace_s: float = 0.0
    silent: bool = False
    given_up: bool = False


class EndRun(Message, frozen=True):
    """The run is over, or goes on without this node: kill what is left, report ``code``."""

    code: int
    reason: str
    node_only: bool = False


# ---------------------------------------------------------------- command line -> agent


class ExitRun(Message, frozen=True):
    """``holdfast exit``: agree on a step, save, leave; ``cancel`` takes it back; after ``grace_s`` it ends anyway.

    ``node_id``: this node of several alone is asked, by a signal to its launcher or the end of it; empty: the job.
    """

    grace_s: float
    source: str
    cancel: bool = False
    node_id: str = ""


class ExitCancelled(Message, frozen=True):
    """To every agent: no request to leave stands any more, none is to be told to the next controller."""

    source: str


class StopRun(Message, frozen=True):
    """Second Ctrl-C: end at once."""

    reason: str


class Ack(Message, frozen=True):
    """Answer to a command line request."""

    ok: bool
    detail: str = ""


# ---------------------------------------------------------------- key-value store (rendezvous of process groups)


class KvRequest(Message, frozen=True):
    """One operation on the key-value store of a generation. ``wait`` blocks on the server until all keys exist."""

    request_id: int
    op: Literal["set", "get", "add", "wait", "check", "compare_set", "delete", "count", "append"]
    keys: tuple[str, ...] = ()
    value: bytes = b""
    expected: bytes = b""
    amount: int = 0
    timeout_s: float = 300.0


class KvReply(Message, frozen=True):
    """Answer to :class:`KvRequest`; ``error`` is ``timeout``, ``missing`` or empty."""

    request_id: int
    value: bytes = b""
    number: int = 0
    ok: bool = True
    error: str = ""


# ---------------------------------------------------------------- events that only a driver makes


class Tick(Message, frozen=True):
    """A timer set by :class:`SetTimer` fired."""

    name: str


class AgentGone(Message, frozen=True):
    """The connection of an agent closed."""

    node_id: NodeId


class ControllerGone(Message, frozen=True):
    """The connection to the controller closed (event for an agent)."""


class ControllerHere(Message, frozen=True):
    """The connection to the (first or restarted) controller is up (event for an agent): it says hello."""


class LauncherGone(Message, frozen=True):
    """The launcher died (event for an agent)."""


# ---------------------------------------------------------------- commands that only a driver executes


class Command(Message, frozen=True):
    """Base of effects that are not messages to another process."""


class Send(Command, frozen=True):
    """Send ``message`` to ``to``: ``agent:<node>``, ``member:<id>``, ``controller``, ``launcher``, or ``shell``: the
    own process carries it out (an agent starts the workers of a StartMembers, signals the one of a KillMember).
    """

    to: str
    message: Message


class SetTimer(Command, frozen=True):
    """Post :class:`Tick` after ``delay_s``; setting a name again replaces it."""

    name: str
    delay_s: float


class CancelTimer(Command, frozen=True):
    """Forget a timer."""

    name: str


Field = str | int | float | bool | list[int] | list[str] | None
"""What a field of a record may hold."""


class LogRecord(Command, frozen=True):
    """One line of the event log. ``kind`` is documented in ``docs/events.md``."""

    kind: str
    data: dict[str, Field]


class RestartController(Command, frozen=True):
    """Agent: the controller is gone, start the one of the next term."""


class Finish(Command, frozen=True):
    """The run is over: journal it, tell the agents, end the controller."""

    code: int
    reason: str
