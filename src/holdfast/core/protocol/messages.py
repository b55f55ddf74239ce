"""The messages of the control plane: events, commands and wire format (see also ``health_messages.py``).

Theory. Workers exchange messages with the agent of their node. The agent forwards messages that carry a ``member_id``
to the controller, and routes the controller's messages to the worker that they name. Tensors never pass here. All
structs are tagged msgspec structs, encoded as msgpack on the wire and as JSON in the event log. Unknown fields are
ignored. A field of a wrong type is refused, and the error names its path.

Invariants:
1. Every message about a generation carries its number. One function (``membership.is_stale``) refuses messages of older
   generations.
2. A command is idempotent by (generation, content), so it may be delivered twice.
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
"""State of one rank in the step protocol.

It is used with a step s: for instance, ``ready`` at s means s committed steps.
"""


class Message(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Base of all messages. The tag on the wire is the name of the class."""


# ---------------------------------------------------------------- worker -> agent -> controller


class WorkerHello(Message, frozen=True):
    """First message of a worker to an agent. The worker sends it again when it has connected to a successor agent."""

    member_id: MemberId
    generation: Generation
    rank: int
    pid: int
    state: RankState = "starting"
    step: int = 0


class SessionOpened(Message, frozen=True):
    """Report that the session of a rank has opened and is at ``step`` (resumed or fresh)."""

    member_id: MemberId
    generation: Generation
    step: int
    root: str = ""  # absolute path or URL where the session saves; empty: nowhere
    # The groups of this rank can be rebuilt, so it keeps its process when lost ranks are replaced.
    live: bool = False


class LayoutPublished(Message, frozen=True):
    """Report of the boxes that this rank holds (``store.layouts.layout.RankLayout``), sent again when they change."""

    member_id: MemberId
    generation: Generation
    rank: int
    version: LayoutVersion  # the vote after which all ranks publish; NO_VERSION: only this rank publishes
    layout: Layout
    size_bytes: int = 0  # of the boxes that this rank holds; 0: not known


class FaultSeen(Message, frozen=True):
    """Report that a collective of this rank broke before the rank received a fence. ``what``: the error."""

    member_id: MemberId
    generation: Generation
    step: int
    what: str


class WorkerFailed(Message, frozen=True):
    """Report that user code of this rank raised an exception.

    The process exits at once or, with ``stays``, only after it has received :class:`Release`.
    """

    member_id: MemberId
    generation: Generation
    step: int
    kind: str
    what: str
    traceback: str
    digest: str  # identifies the exception: type, text, place
    user_error: bool = False  # a typed UserError/StoreError: retrying is pointless
    stays: bool = False  # the session keeps the process and its state until it receives Release
    # Raised between two steps: after a restart that code does not run again at the same step.
    between: bool = False


OUTSIDE_TOLD_MAX = 6


class OutsideCollective(msgspec.Struct, frozen=True, array_like=True):
    """One collective that a script makes outside of a block.

    Attributes:
        what: kind of the collective, and its place in the script, as text.
        variables: variables of the script that may decide whether the script makes this collective.
    """

    what: str
    variables: tuple[str, ...] = ()


class OutsideCollectives(msgspec.Struct, frozen=True, kw_only=True):
    """The collectives that the script of a rank has made outside of blocks since the last block of this rank.

    Only collectives of all ranks count, and only those of the main thread.
    """

    generation: Generation
    step: int  # of the next block
    made: int
    first: tuple[OutsideCollective, ...]  # at most ``OUTSIDE_TOLD_MAX``


def made_in(generation: Generation, step: int, outside: OutsideCollectives | None) -> int:
    """Return how many collectives ``outside`` counts before the block of ``step``; 0 if it is about another block."""
    if outside is None or (outside.generation, outside.step) != (generation, step):
        return 0
    return outside.made


class LoopPlace(msgspec.Struct, frozen=True, array_like=True):
    """The place of a rank in its newest loop over steps.

    Attributes:
        loop: number of the loop.
        ended_at: the step for which this rank has no batch; -1: its loop has not ended.
        steps: number of steps of the loop that has ended.
    """

    loop: int
    ended_at: int = -1
    steps: int = 0


class LoopEnded(Message, frozen=True):
    """Report that this rank has no batch for ``step`` in its ``loop``, and waits for the other ranks."""

    member_id: MemberId
    generation: Generation
    loop: int
    step: int


class Settled(Message, frozen=True):
    """Answer to :class:`Fence`: this rank will not change its state before it receives a :class:`Settle`."""

    member_id: MemberId
    generation: Generation  # the new generation, of the Fence
    state: RankState  # ready, aborted, in_doubt, torn or finished (starting: no session yet)
    step: int
    freed_ns: int = 0  # CLOCK_MONOTONIC when the process was out of its collectives
    away: bool = False  # its main thread is in a section between steps, or has left the loop by an exception
    kept: tuple[int, ...] = ()  # steps whose states the memory tier has in memory for this rank
    rewind: int = -1  # this rank can go back in place to a kept state of this step or later; -1: it cannot
    turns: int = 0  # epochs and phases that the whole job has done, as far as this rank knows
    outside: OutsideCollectives | None = None  # the newest; None: it has made none
    loop: LoopPlace | None = None  # None: it has begun no loop over steps


class SaveReported(Message, frozen=True):
    """Report that this rank's share of a checkpoint is durable, or why it is not (``error``)."""

    member_id: MemberId
    generation: Generation
    save_id: SaveId
    sealed: bool  # this rank found all boxes saved, and sealed the checkpoint
    size_bytes: int
    duration_s: float
    stall_s: float = 0.0
    error: str = ""
    delayed_steps: int = 0  # number of steps by which the previous save, still in progress, delayed this one


class StateOffered(Message, frozen=True):
    """Report that this survivor is at ``step`` and serves its state to newcomers at ``host:port``."""

    member_id: MemberId
    generation: Generation
    step: int
    host: str
    port: int


class StateRefused(Message, frozen=True):
    """Report that this rank's state of ``step`` in memory cannot be used: it does not fit its digest and was dropped.

    The controller decides again. With ``alone`` the state is sound, but no newcomer can receive it while the other
    ranks keep their processes, or the ranks hold different process groups. All ranks then have to start again.
    """

    member_id: MemberId
    generation: Generation
    step: int
    reason: str
    alone: bool = False


class JoinAsked(Message, frozen=True):
    """Report that a newcomer has built its model without peers, and asks for its state."""

    member_id: MemberId
    generation: Generation


class Joined(Message, frozen=True):
    """Report that a newcomer has received, verified and rehearsed the state of ``step``. The job may resume."""

    member_id: MemberId
    generation: Generation
    step: int


class StepReached(Message, frozen=True):
    """Report of the first step that this rank has committed in a generation.

    When all ranks have sent it, the job has resumed.
    """

    member_id: MemberId
    generation: Generation
    step: int


class ExitAsked(Message, frozen=True):
    """Report that a worker was asked to exit gracefully. ``source``: the signal or file that asked."""

    member_id: MemberId
    generation: Generation
    source: str


class OnceAsked(Message, frozen=True):
    """Request for the value that a rank keeps under ``name`` (``holdfast.once``), or a proposal for this value."""

    member_id: MemberId
    name: str
    value: str = ""  # JSON; empty: the rank only asks. The message may be repeated.


class OnceTold(Message, frozen=True):
    """Answer to :class:`OnceAsked`: the value that is kept under ``name``; empty if no value is kept yet."""

    member_id: MemberId
    name: str
    value: str
    full: bool = False  # the proposed value was refused: it is too long, or the rank has too many names


class ExitAgreed(Message, frozen=True):
    """Report that the vote of ``step`` carried the exit request: all ranks save ``step`` and leave."""

    member_id: MemberId
    generation: Generation
    step: int


class Finished(Message, frozen=True):
    """Report that the session of this rank is done: all steps are done, or all ranks agreed to exit.

    The session then waits for Release.
    """

    member_id: MemberId
    generation: Generation
    step: int
    reason: Literal["done", "exit"]
    sealed: bool = False


# ---------------------------------------------------------------- controller -> agent -> worker


class Fence(Message, frozen=True):
    """Order to leave the old generation: leave all collectives, stop at the step boundary, answer with Settled."""

    member_id: MemberId
    generation: Generation  # the new generation
    reason: str


class SaveShare(msgspec.Struct, frozen=True):
    """Order to save one copy of each box.

    The boxes are divided among ``sources``, living ranks that hold the decided state.
    """

    save_id: SaveId
    root: str
    sources: tuple[int, ...]
    layouts: Layouts  # of all ranks, the dead included
    dead_locals: dict[str, bytes]  # rank (text) -> JSON of the rank-local values on the pages of the dead


class Settle(Message, frozen=True):
    """The decision: the job continues at ``step``.

    A rank that is in doubt about the update that leads to ``step`` makes this update.
    """

    member_id: MemberId
    generation: Generation
    step: int
    save: SaveShare | None = None
    then: Literal["restart", "retry", "replace", "stop"] = "restart"
    rewind: int = -1  # all ranks go back to the state of this step that each has in memory; -1: they stay
    vouch: bool = False  # publish layout and digests (``StateDigests``) before the state is given or saved
    # Newcomers compute boxes from memory (see ``Receive``): give only the parts that they need for that.
    replays: bool = False
    turns: int = 0  # epochs and phases that the whole job has done


class Receive(Message, frozen=True):
    """Order to a newcomer to receive the state of ``step`` from ``sources``.

    ``layouts`` name the holders of each box.
    """

    member_id: MemberId
    generation: Generation
    step: int
    sources: dict[str, tuple[str, int]]  # rank (text) -> host, port
    layouts: Layouts
    version: LayoutVersion  # the version of all these layouts; NO_VERSION: they have no common version
    local: bytes = b""  # rank-local values of the lost rank, from its status page
    kept: bool = False  # take the state that the lost rank left in memory, not the state of the sources
    replays: bool = False  # boxes without a living holder: compute them from a state and log in memory
    turns: int = 0  # epochs and phases that the job has done: a state with another number is refused


class ResumeInPlace(Message, frozen=True):
    """Order to continue in the same process: rebuild the groups in the new generation, and run the step again."""

    member_id: MemberId
    generation: Generation
    step: int
    kv_node: str = ""  # as in StartMembers; an agent reads this field when it forwards the message


class Leave(Message, frozen=True):
    """Order to exit now with ``code``."""

    member_id: MemberId
    generation: Generation
    code: int
    reason: str


class Release(Message, frozen=True):
    """Message that every rank has finished, so the session may end.

    It is also sent to a rank whose user code raised, and then allows the end of its process.
    """

    member_id: MemberId
    generation: Generation


class LoopEndSeen(Message, frozen=True):
    """Message that ``rank`` has no batch for ``step`` in its ``loop``, and waits for the other ranks."""

    member_id: MemberId
    generation: Generation
    rank: int
    loop: int
    step: int


class ExitOrder(Message, frozen=True):
    """Order to request the exit of all ranks in the next vote. With ``cancel``: withdraw that request."""

    member_id: MemberId
    generation: Generation
    source: str
    cancel: bool = False


class Catalogued(Message, frozen=True):
    """The catalogue of ``version``: the layouts that all ranks published under it."""

    member_id: MemberId
    generation: Generation
    version: LayoutVersion
    layouts: Layouts


# ---------------------------------------------------------------- agent <-> controller


class MemberSeen(msgspec.Struct, frozen=True):
    """One living worker, as the hello of its agent lists it."""

    member_id: MemberId
    generation: Generation
    rank: int
    pid: int
    state: RankState
    step: int


class AgentHello(Message, frozen=True):
    """First message of an agent, with its workers.

    The agent repeats it when the agent or the controller was replaced.
    """

    node_id: NodeId
    slots: int
    pid: int
    members: tuple[MemberSeen, ...] = ()
    host: str = ""  # address of this node for processes of other nodes; empty: there are no other nodes
    port: int = 0  # a free port of this node, for MASTER_PORT
    clock_ns: int = 0  # CLOCK_MONOTONIC of the node when this was sent


class HeldStates(Message, frozen=True):
    """Report of the states that this node has in memory for ranks of other nodes: steps by rank (text)."""

    node_id: NodeId
    ranks: dict[str, tuple[int, ...]]


class AgentBeat(Message, frozen=True):
    """The heartbeat of an agent to the controller."""

    node_id: NodeId
    clock_ns: int = 0


class ControllerBeat(Message, frozen=True):
    """The heartbeat of the controller to every agent."""

    term: int


class MirrorFrom(Message, frozen=True):
    """Report of an agent with its own event log: the log has the controller's records up to ``number`` of ``term``."""

    node_id: NodeId
    term: int
    number: int


class Mirror(Message, frozen=True):
    """One record of the controller's log for the logs of other nodes.

    It is sent before the messages that follow from it.
    """

    term: int
    number: int
    kind: str
    data: bytes  # JSON


class Rolled(Message, frozen=True):
    """The nodes that have joined and are not lost, as the controller sends them for the elections of the agents."""

    up: tuple[NodeId, ...]


class VotersAre(Message, frozen=True):
    """Report of a changed electorate. A node counts as lost only while a majority of these voters is connected."""

    voters: tuple[NodeId, ...]


class MemberStarted(Message, frozen=True):
    """Report of an agent that the process of a worker exists."""

    member_id: MemberId
    node_id: NodeId
    pid: int


class MemberExited(Message, frozen=True):
    """Report that the process of a worker has ended. State, step and local values are from its status page."""

    member_id: MemberId
    node_id: NodeId
    generation: Generation  # the generation on its status page
    code: int | None  # exit code; None: the process was not a child of the agent
    signal: int | None
    state: RankState
    step: int
    detail: str = ""  # phase name on the page, e.g. "backward"
    locals: dict[int, bytes] = {}  # step -> rank-local values (JSON), of the newest steps
    died_ns: int = 0  # CLOCK_MONOTONIC when the agent detected it
    staged_step: int = 0  # newest step whose share its writer process has taken over; 0: none
    kept: tuple[int, ...] = ()  # steps whose states its rank has left in memory
    # Steps whose states can be computed from a state in memory and a log of updates.
    replays: tuple[int, ...] = ()
    # Size of its log file at its end (later bytes are from its successor); 0: not known.
    log_size_bytes: int = 0
    # Processes of its node's control group that the kernel killed for lack of memory in the lifetime of the member.
    oom_kills: int = 0
    outside: OutsideCollectives | None = None  # the newest; None: it had made none


class Assignment(msgspec.Struct, frozen=True):
    """One member to start, with its seat."""

    member_id: MemberId
    rank: int
    local_rank: int


class StartMembers(Message, frozen=True):
    """Order to an agent to start these workers in ``generation``.

    ``resume`` names the save to load; empty means the newest checkpoint.
    """

    node_id: NodeId
    generation: Generation
    world_size: int
    attempt: int
    members: tuple[Assignment, ...]
    resume: str = ""  # directory name below the root
    root: str = ""  # where the job has saved so far; empty: nowhere
    restart_count: int = 0
    kv_node: str = ""  # node whose agent has the key space of the generation; empty: each agent has its own
    master_host: str = ""  # the node of rank 0, for MASTER_ADDR; empty: the agent's own setting
    master_port: int = 0
    join: bool = False  # they replace lost ranks of a job whose other ranks keep their processes
    places: tuple[tuple[NodeId, str], ...] = ()  # nodes by rank, and addresses; empty: one node


class KillMember(Message, frozen=True):
    """Order to kill a worker and its process group with SIGKILL. With ``grace_s`` > 0, SIGTERM is sent first."""

    member_id: MemberId
    node_id: NodeId
    reason: str
    grace_s: float = 0.0
    # The worker has not answered in time: the agent sends ``Evidence`` about it before the kill.
    silent: bool = False
    # The worker was killed long ago and still exists (an uninterruptible wait). None of its code runs again, so the
    # agent reports its status page as its end.
    given_up: bool = False


class EndRun(Message, frozen=True):
    """Order to an agent to end the run: kill the remaining processes, and end with exit code ``code``."""

    code: int
    reason: str
    node_only: bool = False  # the run continues on other nodes


# ---------------------------------------------------------------- command line -> agent


class ExitRun(Message, frozen=True):
    """Request of ``holdfast exit``: agree on a step, save, leave.

    After ``grace_s`` seconds the run ends in any case.
    """

    grace_s: float
    source: str
    cancel: bool = False  # withdraw an earlier request
    # Only this node leaves, because its launcher was signalled or has ended; empty: the whole job leaves.
    node_id: str = ""


class ExitCancelled(Message, frozen=True):
    """Message to every agent that the request to save and end the run is cancelled.

    An agent repeats an open request to each new controller. After this message the agent no longer repeats it.
    """

    source: str


class StopRun(Message, frozen=True):
    """Request to end the run at once, without a save (second Ctrl-C)."""

    reason: str


class Ack(Message, frozen=True):
    """Answer to a request of the command line. ``ok``: the request was accepted."""

    ok: bool
    detail: str = ""


# ---------------------------------------------------------------- key-value store (rendezvous of process groups)


class KvRequest(Message, frozen=True):
    """One operation on the key-value store of a generation. The operation ``wait`` blocks until all keys exist."""

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
    """Event: the timer ``name``, set by :class:`SetTimer`, has fired."""

    name: str


class AgentGone(Message, frozen=True):
    """Event: the connection of an agent closed."""

    node_id: NodeId


class ControllerGone(Message, frozen=True):
    """Event for an agent: the connection to the controller closed."""


class ControllerHere(Message, frozen=True):
    """Event for an agent: it is connected to the first or a restarted controller. The agent sends its hello."""


class LauncherGone(Message, frozen=True):
    """Event for an agent: the launcher died."""


# ---------------------------------------------------------------- commands that only a driver executes


class Command(Message, frozen=True):
    """Base of the commands of a state machine to the code that drives it (the shell)."""


class Send(Command, frozen=True):
    """Command to send ``message``.

    Attributes:
        to: ``agent:<node>``, ``member:<id>``, ``controller``, ``launcher`` or ``shell``. The shell is the code that
            drives this state machine in its own process. In an agent the shell starts the workers that StartMembers
            names, and signals the worker that KillMember names.
    """

    to: str
    message: Message


class SetTimer(Command, frozen=True):
    """Command to post :class:`Tick` with this name after ``delay_s`` seconds.

    Setting a name again replaces its timer.
    """

    name: str
    delay_s: float


class CancelTimer(Command, frozen=True):
    """Command to drop the timer of this name."""

    name: str


Field = str | int | float | bool | list[int] | list[str] | None
"""Type of a field in a record of the event log."""


class LogRecord(Command, frozen=True):
    """Command to write one record to the event log. ``docs/events.md`` documents each ``kind``."""

    kind: str
    data: dict[str, Field]


class RestartController(Command, frozen=True):
    """Command of an agent, whose controller has ended: start the controller of the next term."""


class Finish(Command, frozen=True):
    """Command to end the run: journal the end, send it to the agents, end the controller."""

    code: int
    reason: str
