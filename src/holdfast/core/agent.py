"""The agent of one node: its workers, and its connections to controller, launcher and command line.

Theory. The agent decides nothing about the job. It starts, signals and reaps the workers of its node, and forwards
messages. It also keeps messages, so that every other process can be replaced. It keeps the last message of each kind
from each worker of the newest generation, the layouts of all ranks, and the messages that could not be delivered. A new
controller gets the agent's hello, then all of these messages, then a heartbeat. When the controller is lost, the agent
commands the start of a new one. When the launcher is lost, the agent asks for a graceful exit, because no person
watches the run then.

The shell is the code that drives this state machine: it starts and signals processes.

Invariants:
1. A member is started at most once, and never after its kill or its exit.
2. A worker's last message of each kind reaches every controller. Requests to end the run and reports of faults are kept
   until a controller has received them.
3. After ``EndRun`` (the order to end the run) the agent ends when its last worker has ended, never before.
4. An agent fulfils each request to leave, with or without a controller: at once if the job has not begun on its node,
   otherwise within the deadline of the request. It always carries out a request to stop.
"""

from __future__ import annotations

from collections import deque

import msgspec

from holdfast.core.config import AgentConfig
from holdfast.core.ids import EVERYBODY, NO_GENERATION, Generation, MemberId, NodeId
from holdfast.core.job.membership import is_stale
from holdfast.core.job.spares import SPARE_TIMER, CallSpare, Spares, is_spare
from holdfast.core.protocol.health_messages import (
    Active,
    CollectEvidence,
    CopiesDiffer,
    Evidence,
    Late,
    ProgressResumed,
    Stalled,
    StateDigests,
    StepTimes,
)
from holdfast.core.protocol.messages import (
    Ack,
    AgentBeat,
    AgentHello,
    Assignment,
    CancelTimer,
    Catalogued,
    Command,
    ControllerGone,
    ControllerHere,
    EndRun,
    ExitAgreed,
    ExitAsked,
    ExitCancelled,
    ExitRun,
    FaultSeen,
    Finish,
    Finished,
    HeldStates,
    JoinAsked,
    Joined,
    KillMember,
    LauncherGone,
    LayoutPublished,
    LogRecord,
    LoopEnded,
    MemberExited,
    MemberSeen,
    MemberStarted,
    Message,
    OnceAsked,
    RankState,
    RestartController,
    SaveReported,
    Send,
    SessionOpened,
    SetTimer,
    Settled,
    StartMembers,
    StateOffered,
    StateRefused,
    StepReached,
    StopRun,
    Tick,
    WorkerFailed,
    WorkerHello,
)
from holdfast.core.protocol.notices import (
    DrainNode,
    HoldReached,
    Notice,
    NoticeOver,
    Notices,
    PrepareSeats,
)
from holdfast.core.protocol.peer_messages import JobFormed
from holdfast.exit_codes import Exit
from holdfast.text import plural

REMEMBERED = (
    WorkerHello,
    SessionOpened,
    LayoutPublished,
    WorkerFailed,
    StepReached,
    HoldReached,
    FaultSeen,
    CopiesDiffer,
    Settled,
    SaveReported,
    Finished,
    JoinAsked,
    Joined,
    MemberExited,
)
"""Kinds of messages of which the agent repeats the last one of each member after each hello, in this order.

The hello goes to a new controller, or to a controller whose connection was lost with the messages on it.
"""
REPEATED = tuple(kind for kind in REMEMBERED if kind not in (WorkerHello, WorkerFailed, MemberExited))
"""Kinds of messages of which a worker repeats its last one after its hello to the next agent.

That message may have been lost with the previous agent. Answers to orders are left out: the controller repeats an order
after the hello.
"""
LEAVE_TIMER = "leave"
UPWARD = (
    *REMEMBERED,
    *(
        ExitAsked,
        ExitAgreed,
        LoopEnded,
        StateOffered,
        StateRefused,
        StateDigests,
        OnceAsked,
    ),
)
"""Messages from a worker to the controller. Every other message that names a member is sent to that worker."""


class Worker(msgspec.Struct, kw_only=True):
    """One worker of this node, as its agent knows it."""

    member_id: MemberId
    generation: Generation
    rank: int  # -1: left by a dead agent, has not sent a hello yet
    pid: int = 0
    alive: bool = True
    doomed: bool = False  # its death was ordered
    state: RankState = "starting"
    step: int = 0
    words: dict[str, Message] = {}  # last message of each kind in ``REMEMBERED``, by name of the kind


class Agent:
    """The state machine that handles the events of one node. The shell executes ``Send(to="shell")`` and reports the
    results.

    The shell reports an exit for every member that it is ordered to kill, also for a member that has no process yet.
    """

    def __init__(self, config: AgentConfig) -> None:
        self.config = config
        self.node_id = NodeId(config.node_id)
        self.workers: dict[MemberId, Worker] = {}
        self.generation = NO_GENERATION
        self.connected = False
        self.ending: EndRun | None = None
        self.ended = False
        self._started: set[MemberId] = set()
        self._restarts = 0
        self._request: ExitRun | None = None  # the last request; it is sent to every controller
        self._due_s = 0.0  # deadline of the request
        self._stop: StopRun | None = None
        self._notices = Notices()
        self._begun = False  # other agents, or a controller, rely on this agent
        self._here_s = 0.0
        self._pending: deque[Message] = deque()
        self._catalogue: Catalogued | None = None
        self._held: HeldStates | None = None
        self._out: list[Command] = []
        self.spares = Spares(config, self._out)

    def start(self, now: float) -> list[Command]:
        """Return the first commands of the agent, before any event."""
        self._out.append(SetTimer(name="beat", delay_s=self.config.beat_s))
        return self._take()

    def handle(self, now: float, event: Message) -> list[Command]:
        """Handle one event at ``now`` (seconds). Return the commands that follow from it."""
        if is_spare(getattr(event, "member_id", 0)):
            self.spares.heard(event)
            return self._take()
        match event:
            case ControllerHere():
                self._here_s = now
                self._hello()
            case ControllerGone():
                self._controller_gone(now)
            case JobFormed():
                self._begun = True
            case LauncherGone():
                own, grace_s = self.config.node_of_several, self.config.grace_s
                self._ask_exit(now, ExitRun(grace_s=grace_s, source="launcher lost", node_id=own))
            case ExitRun():
                self._out.append(Send(to="launcher", message=self._answer(event)))
                self._ask_exit(now, event)
            case ExitCancelled():
                self._request = None
            case StopRun():
                self._out.append(Send(to="launcher", message=self._answer(event)))
                self._ask_stop(event)
            case DrainNode() | Notice() | NoticeOver() | PrepareSeats() if self.ending is None:
                self._leaving(now, event)
            case DrainNode():
                refusal = f"the run is ending: {self.ending.reason if self.ending else ''}"
                self._out.append(Send(to="launcher", message=Ack(ok=False, detail=refusal)))
            case Tick():
                if event.name == "beat":
                    self._out.append(SetTimer(name="beat", delay_s=self.config.beat_s))
                    if self.connected:
                        self._tell(AgentBeat(node_id=self.node_id))
                elif event.name == LEAVE_TIMER:
                    self._leave("no controller came back before the deadline")
                elif event.name == SPARE_TIMER:
                    self._build_spares()
                elif event.name.startswith("called:"):
                    self._check_called(MemberId(int(event.name[7:])))
            case StartMembers():
                self._start_members(event)
            case KillMember():
                self._kill(event)
            case CollectEvidence():
                self._out.append(Send(to="shell", message=event))
            case HeldStates():
                self._held = event
                if self.connected:
                    self._tell(event)
            case Stalled() | Late() | ProgressResumed() | Active() | Evidence() | StepTimes():
                if self.connected:  # such a report is repeated while its cause lasts
                    self._tell(event)
            case Catalogued():
                if event.member_id == EVERYBODY:
                    self._spread(event)
                else:
                    self._recall(event)
            case EndRun():
                self._end(event)
            case MemberStarted():
                self._member_started(event)
            case MemberExited():
                self._member_exited(event)
            case _:
                self._pass_on(event)
        return self._take()

    def check(self) -> None:
        """Raise AssertionError if a spare counts as a worker, if a worker outlives its agent, or if too many messages
        are kept.
        """
        assert not (self.ended and any(w.alive for w in self.workers.values())), "ended with a living worker"
        assert not any(is_spare(w) for w in self.workers), "a spare among the workers"
        assert len(self._pending) <= self.config.pending_max, "more is kept than allowed"

    def snapshot(self) -> dict[str, object]:
        """Return node name, living workers and whether a controller is connected, as plain data for reports."""
        return {
            "node": str(self.node_id),
            "living": sorted(w.member_id for w in self.workers.values() if w.alive),
            "connected": self.connected,
            "ended": self.ended,
        }

    # ---------------------------------------------------------------- controller

    def _hello(self) -> None:
        self.connected = self._begun = True
        living = [w for _, w in sorted(self.workers.items()) if w.alive]
        seen = tuple(MemberSeen(w.member_id, w.generation, w.rank, w.pid, w.state, w.step) for w in living)
        config = self.config
        hello = AgentHello(
            node_id=self.node_id,
            slots=config.slots,
            pid=config.pid,
            members=seen,
            host=config.host,
            port=config.port,
        )
        self._tell(hello)
        for kind in REMEMBERED:
            for _, worker in sorted(self.workers.items()):
                word = worker.words.get(kind.__name__)
                if word is not None:
                    self._tell(word)
        if self._catalogue is not None:
            # Includes ranks of a node that may be lost together with the controller.
            self._tell(self._catalogue)
        if self._held is not None:
            self._tell(self._held)
        while self._pending:
            self._tell(self._pending.popleft())
        self._tell_request()
        for notice in self._notices.standing(self._here_s):
            self._tell(notice)
        self._tell(AgentBeat(node_id=self.node_id))

    def _controller_gone(self, now: float) -> None:
        if self.connected and now - self._here_s >= self.config.steady_s:
            # This controller worked. A controller that fails on its first messages fails at once, every time.
            self._restarts = 0
        self.connected = False
        if self.ending is not None or self.ended:
            return
        if self._stop is not None:
            self._stop_now(self._stop)
            return
        self._keep_deadline(now)
        self._restarts += 1
        if self._restarts > self.config.restarts_max:
            reason = (
                f"the controller ended at once {plural(self._restarts, 'time')} in a row: see controller.log"
            )
            self._end(EndRun(code=int(Exit.INTERNAL), reason=reason))
            return
        self._record("controller_lost", restarts=self._restarts)
        self._out.append(RestartController())

    def _answer(self, request: ExitRun | StopRun) -> Ack:
        if self.ending is not None:
            return Ack(ok=False, detail=f"the run is ending: {self.ending.reason}")
        if isinstance(request, StopRun):
            return Ack(ok=True, detail="stopping at once")
        if self._is_idle and not request.cancel:
            return Ack(ok=True, detail="leaving at once: nothing has begun")
        what = "taking the request back" if request.cancel else f"leaving within {request.grace_s:g} s"
        return Ack(ok=True, detail=what if self.connected else f"{what}, as soon as a controller is back")

    def _leaving(self, now: float, event: DrainNode | Notice | NoticeOver | PrepareSeats) -> None:
        """Handle a message about leaving nodes. Send each notice to the present controller and to each later one."""
        if isinstance(event, PrepareSeats):
            self.spares.prepare(event)
            return
        if isinstance(event, NoticeOver):
            self._notices.over(event)
            return
        if isinstance(event, DrainNode):
            later = "" if self.connected else ", as soon as a controller is back"
            detail = f"{'it stays' if event.withdrawn else 'it is asked to leave'}{later}"
            self._out.append(Send(to="launcher", message=Ack(ok=True, detail=detail)))
            event = event.as_notice()
        if self._notices.note(now, event) and self.connected:
            self._tell(event)

    def _ask_exit(self, now: float, request: ExitRun) -> None:
        """Forward an exit request to this and each later controller: one may die before it has read the request."""
        if self.ending is not None:
            return
        self._request, self._due_s = request, now + request.grace_s
        if self.connected:
            self._tell(request)
        elif self._is_idle and not request.cancel:
            self._leave("nothing had begun, no controller was there yet")
        else:
            self._keep_deadline(now)

    def _ask_stop(self, request: StopRun) -> None:
        """Forward a stop request. Without a controller, end the run on this node at once."""
        self._stop = request
        if self.connected and self.ending is None:
            self._tell(request)
        else:
            self._stop_now(request)

    def _stop_now(self, request: StopRun) -> None:
        self._end(EndRun(code=int(Exit.INTERRUPTED), reason=request.reason))

    def _keep_deadline(self, now: float) -> None:
        """Set the timer for the deadline of the exit request in force.

        Without a controller, only the agent has this deadline.
        """
        if self._request is None:
            return
        if self._request.cancel:
            self._out.append(CancelTimer(name=LEAVE_TIMER))
        else:
            self._out.append(SetTimer(name=LEAVE_TIMER, delay_s=max(0.0, self._due_s - now)))

    def _tell_request(self) -> None:
        """Repeat the exit request to the controller, with its remaining time.

        From then on the controller keeps the deadline.
        """
        if self._request is not None:
            left_s = max(0.0, self._due_s - self._here_s)
            self._tell(msgspec.structs.replace(self._request, grace_s=left_s))
        self._out.append(CancelTimer(name=LEAVE_TIMER))

    @property
    def _is_idle(self) -> bool:
        """True if this node has had no contact with the rest of the job and has started no worker."""
        return not self._begun and not self._started

    def _leave(self, why: str) -> None:
        source = self._request.source if self._request is not None else ""
        code, reason = Exit.UNSAVED, f"asked to exit ({source}): {why}"
        self._record("run_ended", code=int(code), cause=code.name, reason=reason)
        self._end(EndRun(code=int(code), reason=reason))

    def _tell(self, message: Message) -> None:
        self._out.append(Send(to="controller", message=message))

    def _keep(self, message: Message) -> None:
        if len(self._pending) >= self.config.pending_max:
            self._pending.popleft()
            self._record("dropped", what=type(message).__name__)
        self._pending.append(message)

    # ---------------------------------------------------------------- workers

    def _pass_on(self, event: Message) -> None:
        """Forward a message between a worker and the controller. Its ``member_id`` names the worker."""
        member_id = getattr(event, "member_id", None)
        if member_id is None:
            return
        if not isinstance(event, UPWARD):
            self._out.append(Send(to=f"member:{member_id}", message=event))
            return
        worker = self.workers.get(member_id)
        if isinstance(event, WorkerHello):
            worker = self._worker_hello(event)
        if worker is not None:
            self._note(worker, event)
        if self.connected:
            self._tell(event)
        elif worker is None or not isinstance(event, REMEMBERED):
            self._keep(event)

    def _spread(self, catalogued: Catalogued) -> None:
        """Send the catalogue to every worker of the node. The controller sends it only once per node."""
        self._catalogue = catalogued
        for living in [w.member_id for w in self.workers.values() if w.alive]:
            own = msgspec.structs.replace(catalogued, member_id=living)
            self._out.append(Send(to=f"member:{living}", message=own))

    def _recall(self, catalogued: Catalogued) -> None:
        """Keep the catalogue that a worker received through an earlier agent.

        The ranks that were lost with that agent cannot publish their layouts again.
        """
        known = self._catalogue
        if known is None or known.version < catalogued.version:
            self._catalogue = catalogued
            if self.connected:
                self._tell(catalogued)

    def _worker_hello(self, event: WorkerHello) -> Worker:
        worker = self._known(event.member_id)
        self.generation = max(self.generation, event.generation)
        worker.pid, worker.generation, worker.rank = event.pid, event.generation, event.rank
        worker.state, worker.step = event.state, event.step
        return worker

    def _note(self, worker: Worker, event: Message) -> None:
        if isinstance(event, REMEMBERED):
            worker.words = {**worker.words, type(event).__name__: event}
        if isinstance(event, Settled):
            worker.state, worker.step = event.state, event.step
        elif isinstance(event, SessionOpened | StepReached):
            worker.state, worker.step = "ready", event.step
        if isinstance(event, StepReached):
            self._build_spares()

    def _start_members(self, order: StartMembers) -> None:
        if self.ending is not None or is_stale(order.generation, self.generation):
            return
        self.spares.fit(order.world_size)
        if order.generation > self.generation:
            self.generation = order.generation
            if not order.join:  # with ``join``, messages of lost ranks count until the job has resumed
                self.workers = {m: w for m, w in self.workers.items() if w.alive}
        fresh = tuple(a for a in order.members if a.member_id not in self._started)
        for seat in fresh:
            self._started.add(seat.member_id)
            self.workers[seat.member_id] = Worker(
                member_id=seat.member_id, generation=order.generation, rank=seat.rank
            )
        self._let_start(order, fresh)

    def _let_start(self, order: StartMembers, fresh: tuple[Assignment, ...]) -> None:
        """Give the seats of newcomers to spares while spares are left. Start the other members as new processes."""
        rest = []
        for seat in fresh:
            spare = self.spares.take(seat) if order.join else None
            if spare is None:
                rest.append(seat)
                continue
            call = CallSpare(spare=spare, order=msgspec.structs.replace(order, members=(seat,)))
            self._out.append(Send(to="shell", message=call))
            self._out.append(SetTimer(name=f"called:{seat.member_id}", delay_s=self.config.called_s))
        if rest:
            self._out.append(Send(to="shell", message=msgspec.structs.replace(order, members=tuple(rest))))

    def _check_called(self, member_id: MemberId) -> None:
        worker = self.workers.get(member_id)
        if worker is not None and worker.alive and WorkerHello.__name__ not in worker.words:
            self._kill_now(worker, f"a spare that did not answer within {self.config.called_s:g} s", 0.0)

    def _build_spares(self) -> None:
        """Build the missing spares if a worker of this node has committed a step."""
        here = [w for w in self.workers.values() if w.alive and StepReached.__name__ in w.words]
        if self.config.spares and self.ending is None and here:
            newest = max(w.generation for w in here)
            self.spares.top_up(newest, [w.rank for w in here])

    def _known(self, member_id: MemberId) -> Worker:
        """Return the worker with this id. If it is unknown, add it: an earlier agent has started its process."""
        worker = self.workers.get(member_id)
        if worker is None:
            worker = self.workers[member_id] = Worker(member_id=member_id, generation=NO_GENERATION, rank=-1)
            self._started.add(member_id)
        return worker

    def _member_started(self, event: MemberStarted) -> None:
        worker = self._known(event.member_id)
        worker.pid = event.pid
        if worker.doomed:
            self._kill_now(worker, "its death was ordered before it existed", 0.0)
        if self.connected:
            self._tell(event)

    def _member_exited(self, event: MemberExited) -> None:
        worker = self._known(event.member_id)
        worker.alive = False
        worker.words = {**worker.words, MemberExited.__name__: event}
        if self.connected:
            self._tell(event)
        self._finish_if_empty()

    def _kill(self, order: KillMember) -> None:
        worker = self.workers.get(order.member_id)
        if worker is not None and worker.alive:
            worker.doomed = True
            self._out.append(Send(to="shell", message=order))

    def _kill_now(self, worker: Worker, reason: str, grace_s: float) -> None:
        worker.doomed = True
        kill = KillMember(member_id=worker.member_id, node_id=self.node_id, reason=reason, grace_s=grace_s)
        self._out.append(Send(to="shell", message=kill))

    def _end(self, order: EndRun) -> None:
        if self.ending is not None:
            return
        self.ending = order
        if order.node_only:
            code = Exit(order.code)
            self._record("run_ended", code=order.code, cause=code.name, reason=order.reason, left=1)
        self._out.append(CancelTimer(name="beat"))
        for _, worker in sorted(self.workers.items()):
            if worker.alive:
                self._kill_now(worker, order.reason, 0.0)
        self._finish_if_empty()

    def _finish_if_empty(self) -> None:
        if self.ending is None or self.ended or any(w.alive for w in self.workers.values()):
            return
        self.ended = True
        self._out.append(Finish(code=self.ending.code, reason=self.ending.reason))

    def _record(self, kind: str, /, **data: str | int) -> None:
        self._out.append(LogRecord(kind=kind, data={**data, "node": str(self.node_id)}))

    def _take(self) -> list[Command]:
        out = list(self._out)
        self._out.clear()
        return out
