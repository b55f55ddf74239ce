"""The controller of a job: it routes each event to the part that handles it.

Theory. All decisions about the job are made in one place, by pure code: ``handle(now, event)`` changes state and
returns commands. The driver (the code that runs this state machine) first writes the log records among the commands to
the event log, then executes the other commands. The parts are in ``core/job`` and ``core/watch``: ``recovery``
(faults), ``ending`` (exits and the end of the run), ``liveness`` (silent nodes), ``fleet`` (nodes and processes),
``hangs`` (stalls). A controller of a later term derives the state of the job from the agents' reports and the log
(``log_replay.py``).

``now`` is in seconds of CLOCK_MONOTONIC of this host, so it can be compared with the times ``died_ns`` and ``freed_ns``
in messages.

Invariants:
1. A worker's message counts only if its sender is a member of the job. A message of a kind in ``PROTOCOL`` (reports
   about faults, recoveries and stops) counts only if it is of the newest generation.
2. If a new controller finds every member alive in the newest issued generation, it leaves all of them undisturbed.
3. No wait is endless: a process that the controller waits for is removed from the job when a timer ends.
"""

from __future__ import annotations

import msgspec

from holdfast.core.config import Config
from holdfast.core.decide.stop_policy import Failure
from holdfast.core.ids import EVERYBODY
from holdfast.core.job.departure import Departures
from holdfast.core.job.failed_devices import certainty
from holdfast.core.job.fault import FaultKind
from holdfast.core.job.job_state import Job, Uncovered
from holdfast.core.job.log_replay import ReplayedState
from holdfast.core.job.made_once import MadeOnce
from holdfast.core.job.membership import Member, is_stale, node_order
from holdfast.core.job.node_tracker import NodeTracker
from holdfast.core.job.recovery import Recovery
from holdfast.core.job.shutdown import Shutdown
from holdfast.core.protocol.health_messages import (
    Active,
    CopiesDiffer,
    Evidence,
    Late,
    ProgressResumed,
    Stalled,
    StateDigests,
    StepTimes,
)
from holdfast.core.protocol.messages import (
    AgentBeat,
    AgentGone,
    AgentHello,
    Catalogued,
    Command,
    ExitAgreed,
    ExitAsked,
    ExitRun,
    FaultSeen,
    Finished,
    HeldStates,
    JoinAsked,
    Joined,
    LayoutPublished,
    LoopEnded,
    LoopEndSeen,
    MemberExited,
    MemberStarted,
    Message,
    OnceAsked,
    SaveReported,
    SessionOpened,
    Settled,
    StateOffered,
    StateRefused,
    StepReached,
    StopRun,
    Tick,
    VotersAre,
    WorkerFailed,
    WorkerHello,
)
from holdfast.core.protocol.notices import HoldReached, Notice, SeatsPrepared
from holdfast.core.watch.corruption import Corruption
from holdfast.core.watch.hang_detection import Hangs
from holdfast.core.watch.stragglers import Stragglers

PROTOCOL = (
    Settled,
    FaultSeen,
    LoopEnded,
    StepReached,
    StateOffered,
    StateRefused,
    JoinAsked,
    Joined,
    HoldReached,
)
"""Messages of workers that count only in the newest generation."""


class Controller:
    """The state machine that decides for one job.

    Args:
        config: the settings.
        past: the state of earlier controllers, read from the event log.
        uncovered: function that returns why the given ranks cannot save the whole state; empty if they can.
    """

    def __init__(self, config: Config, past: ReplayedState, uncovered: Uncovered) -> None:
        self.job = Job(config, past, uncovered)
        self.recovery = Recovery(self.job)
        self.ending = Shutdown(self.job, self.recovery)
        self.fleet = NodeTracker(self.job, self.recovery, self.ending, past)
        self.departures = Departures(self.job, self.fleet, self.recovery, self.ending)
        self.hangs = Hangs(self.job, self.recovery)
        self.stragglers = Stragglers(self.job, self.recovery)
        self.corruption = Corruption(self.job, self.recovery)
        self.once = MadeOnce(self.job, past)
        self._loop_end: LoopEnded | None = (
            None  # the first report of the newest end of a loop at which a rank waits
        )

    def start(self, now: float) -> list[Command]:
        """Return the first commands of this controller, before any event."""
        job = self.job
        job.record(
            "run_started", run=job.config.run_id, world_size=job.config.world_size, term=job.config.term
        )
        self.fleet.start()
        self.ending.start()
        return job.take()

    def handle(self, now: float, event: Message) -> list[Command]:
        """Handle one event at ``now`` (seconds of CLOCK_MONOTONIC). Return the commands that follow from it."""
        match event:
            case AgentHello():
                self.hangs.rejoined(event.node_id)
                self.fleet.agent_hello(now, event)
                self.departures.joined(now, event.node_id)
            case HeldStates():
                self.job.held[event.node_id] = {int(r): frozenset(s) for r, s in event.ranks.items()}
            case AgentBeat():
                self.fleet.agent_beat(now, event.node_id)
            case AgentGone():
                self.fleet.agent_gone(now, event.node_id)
            case MemberStarted():
                self.fleet.member_started(now, event)
            case MemberExited():
                self.fleet.member_exited(now, event)
            case Stalled():
                self.hangs.stalled(now, event)
            case Late():
                self.hangs.late(event)
            case ProgressResumed():
                self.hangs.moved(now, event)
            case Active():
                self.recovery.awaited.active(now, event)
            case Evidence():
                self.hangs.evidence(now, event)
            case StepTimes():
                self.stragglers.paced(event)
            case ExitRun():
                if event.cancel:
                    self.departures.cancel()
                    self.ending.cancel(event.source)
                else:
                    self.departures.asked(now, event)
            case Notice():
                self.departures.noticed(now, event)
            case SeatsPrepared():
                self.departures.seats_prepared(now, event)
            case StopRun():
                self.ending.stop(event.reason)
            case Catalogued():
                self.job.roster.recall(event, self.job.world_size)
            case VotersAre():
                self.job.liveness.voters = event.voters
                self.departures.look(now)
            case Tick():
                self._tick(now, event.name)
            case WorkerHello():
                self.fleet.worker_hello(now, event)
                self.departures.worker_hello(event)
            case _:
                self._from_worker(now, event)
        if self.recovery.rules.trains:
            self.ending.release()
        return self.job.take()

    def check(self) -> None:
        """Raise InternalError if two members share a rank, or a member is both alive and ended."""
        self.job.roster.check()

    def snapshot(self) -> dict[str, object]:
        """Return phase, generation, step and living ranks of the job as plain data, for reports and the simulator."""
        job = self.job
        return {
            "phase": self.recovery.phase,
            "generation": str(job.generation),
            "step": job.step,
            "ended": job.ended,
            "living": [m.rank for m in job.roster.living],
        }

    # ---------------------------------------------------------------- workers

    def _from_worker(self, now: float, event: Message) -> None:
        member_id = getattr(event, "member_id", None)
        member = self.job.roster.get(member_id) if member_id is not None else None
        # On a slow network, a layout may arrive after the exit of its member.
        if member is None or not (member.alive or isinstance(event, LayoutPublished)):
            return
        match event:
            case SessionOpened():
                self._session_opened(now, member, event)
            case LayoutPublished():
                self._layout_published(member, event)
            case WorkerFailed():
                self._worker_failed(now, member, event)
            case ExitAsked():
                if not self.job.exit_source:  # a request in force has a deadline, which may be shorter
                    self.ending.request(now, event.source, self.job.config.grace_s)
            case ExitAgreed():
                self.ending.agreed(event.step)
            case Finished():
                self.ending.finished(member, event)
                self.recovery.progress(now)
            case CopiesDiffer():
                self.corruption.differ(now, member, event)
            case StateDigests():
                self.recovery.bounds.moved(member.member_id)
                self.corruption.vouched(now, member, event)
            case SaveReported():
                self._save_reported(now, member, event)
            case OnceAsked():
                self.once.asked(member, event)
            case _ if isinstance(event, PROTOCOL) and not is_stale(event.generation, self.job.generation):
                self._protocol(now, member, event)
            case _:
                return

    def _begun(self, now: float, member: Member) -> None:
        """Record that a process has reached its first step, and how long it took from its start."""
        if not member.begun and member.started_s:
            self.job.begun_s = max(self.job.begun_s, now - member.started_s)
        member.begun = True

    def _protocol(self, now: float, member: Member, event: Message) -> None:
        self.recovery.bounds.moved(member.member_id)
        match event:
            case StateOffered():
                self.recovery.offered(member, event)
            case StateRefused():
                self.recovery.refused(now, member, event)
            case JoinAsked():
                self.recovery.join_asked(member)
            case Joined():
                self.recovery.joined(now, member, event)
            case Settled():
                self.recovery.settled(now, member, event)
            case FaultSeen():
                self.recovery.suspect(now, member, event)
            case LoopEnded():
                self._loop_ended(member, event)
            case HoldReached():
                self.departures.holding(now, event)
            case StepReached():
                self._begun(now, member)
                member.commit(event.step)
                self.recovery.progress(now)

    def _loop_ended(self, member: Member, event: LoopEnded) -> None:
        """Pass the report of a rank at the end of its loop to all ranks.

        Only the reports of the first such rank are passed on: those of the others show nothing more.
        """
        job = self.job
        if event.generation != job.roster.generation or not self.recovery.rules.trains:
            return
        first = self._loop_end
        if first is None or msgspec.structs.replace(event, member_id=first.member_id) != first:
            self._loop_end = event
        elif event != first:
            return
        for living in job.roster.living:
            seen = LoopEndSeen(
                member_id=living.member_id,
                generation=event.generation,
                rank=member.rank,
                loop=event.loop,
                step=event.step,
            )
            job.send(living, seen)

    def _session_opened(self, now: float, member: Member, event: SessionOpened) -> None:
        job = self.job
        first, job.session = not job.session, True
        self.recovery.bounds.moved(member.member_id)
        job.root = event.root or job.root
        member.opened_step = event.step
        member.live = event.live
        member.report("ready", event.step)
        self.ending.remind(member)
        self.recovery.opened(now)
        # Until now the job had no session, and an exit with code 0 was no fault.
        for other in job.roster.dead if first else ():
            if (
                other.opened_step is None
                and other.finished is None
                and not self.recovery.faults.blames(other)
            ):
                self.recovery.member_fault(now, other, "exit", "left without a session")

    def _layout_published(self, member: Member, event: LayoutPublished) -> None:
        job = self.job
        job.state_size_bytes = max(job.state_size_bytes, event.size_bytes)
        known = job.roster.catalogued
        layouts = job.roster.publish(event, job.world_size)
        if layouts is None:
            return
        catalogued = Catalogued(
            member_id=EVERYBODY, generation=job.generation, version=event.version, layouts=layouts
        )
        again = event.version == known
        nodes = {member.node_id} if again else job.roster.nodes
        for node_id in sorted(nodes, key=node_order):
            job.send_node(node_id, catalogued)  # once per node, because the message grows with the job

    def _worker_failed(self, now: float, member: Member, event: WorkerFailed) -> None:
        job = self.job
        if member.failed is not None:
            return
        member.failed = event
        over = self.ending.stopping is not None or (job.released and not job.repeats)
        if over or not event.stays:
            job.let_go(member)
        if over:
            return
        failure = Failure(
            rank=member.rank,
            step=event.step,
            kind=event.kind,
            what=event.what,
            digest=event.digest,
            occurrence=event.generation.pack(),
            user_error=event.user_error,
            between=event.between,
        )
        sure = certainty(event.kind, event.what) if not event.user_error else ""
        if sure:
            excused = job.device_failed(member, failure, certain=sure == "certain")
            failure = msgspec.structs.replace(failure, by_device=excused)
        kind: FaultKind = "device" if failure.by_device else "exception"
        self.recovery.member_fault(now, member, kind, f"{event.kind}: {event.what}", failure)

    def _save_reported(self, now: float, member: Member, event: SaveReported) -> None:
        job, save_id = self.job, event.save_id
        self.departures.saved(event.duration_s)
        job.record(
            "saved",
            rank=member.rank,
            step=save_id.step,
            save_kind=save_id.kind,
            directory=save_id.directory(),
            size_bytes=event.size_bytes,
            duration_s=event.duration_s,
            stall_s=event.stall_s,
            error=event.error,
            delayed_steps=event.delayed_steps,
        )
        if event.sealed and not event.error and job.sealed_directory != save_id.directory():
            job.sealed_directory = save_id.directory()
            job.seal(save_id)
            job.record(
                "sealed",
                step=save_id.step,
                save_kind=save_id.kind,
                directory=save_id.directory(),
                generation=str(save_id.generation),
            )
        self.recovery.save_reported(now, member, event)

    def _tick(self, now: float, name: str) -> None:
        if name == "exit":
            self.ending.deadline()
        elif name == "together":
            self.ending.exited()
        elif not any(
            part.tick(now, name) for part in (self.fleet, self.departures, self.hangs, self.corruption)
        ):
            self.recovery.tick(now, name)
        if name == "beat":  # a node may have been left out since the last beat
            self.departures.look(now)
