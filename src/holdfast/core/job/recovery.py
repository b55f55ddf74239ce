"""Life of a fault: from the first sign of it to a committed step at full size.

Theory. A recovery is one small machine over the phases of ``phases.PHASES``; the six phases that users see
(detected, fenced, quiesced, planned, restored, resumed) are the times at which it passes its edges.
``decide`` is the heart and is pure: given what every rank of the old generation reported, or left on its
status page, where does the job stand? A second fault while a decision is being carried out starts again at
the fence, under a new generation; until the decision it just joins. All orders are idempotent by generation,
so ``remind`` may repeat them to whoever reconnected.

Invariants:
1. A decision is made only when each rank of the old generation has reported to the newest fence or is
   confirmed dead.
2. One decision per generation, recorded before anyone is told.
3. The job never stands below a step that a living rank has committed, nor above one that somebody entered
   UPDATING for.
4. Only ranks that stand at the decided step, or can be brought there, are sources of a save.
5. New members start only when every old one is gone, or in the seats of the dead beside those that live on.
6. A newcomer is a member from ``SessionOpened`` on, when it holds its state; a fault before that removes it.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from holdfast.core.decide.decision import Decision, decide, stands_in
from holdfast.core.decide.ladder import judge
from holdfast.core.decide.recovery_phases import PHASES, Phase
from holdfast.core.decide.stop_policy import STOP_CODE, Answered, Failure, LadderVerdict
from holdfast.core.ids import MemberId, NodeId, memory_name
from holdfast.core.job.awaited import Awaited
from holdfast.core.job.completion import AllOf
from holdfast.core.job.early_exits import missed
from holdfast.core.job.fault import Fault, FaultKind, Faults, Seen
from holdfast.core.job.job_state import Job
from holdfast.core.job.last_gasp import LastGaspSave
from holdfast.core.job.membership import Member
from holdfast.core.job.replacement import Replacement
from holdfast.core.job.situation import Survey
from holdfast.core.job.wait_bounds import Bounds
from holdfast.core.protocol.health_messages import Active, StateDigests
from holdfast.core.protocol.messages import (
    FaultSeen,
    Fence,
    Joined,
    Leave,
    Message,
    Receive,
    ResumeInPlace,
    SaveReported,
    Settle,
    Settled,
    StateOffered,
    StateRefused,
)
from holdfast.errors import InternalError
from holdfast.exit_codes import Exit
from holdfast.text import plural

IN_PLACE = ("retrying", "replacing", "resuming")
DECIDED: tuple[Seen, ...] = ("fenced", "quiesced", "planned")
"""What the fault of a newcomer need not go through again: the decision that it was started for stands."""


class Recovery:
    """Sub-machine of the controller. ``job`` is shared with it."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.bounds = Bounds(job)
        self.replacement = Replacement(job, self.bounds)
        self.gasp = LastGaspSave(job)
        self.survey = Survey(job, self.replacement, self.gasp)
        self.awaited = Awaited(job, self)
        self.phase: Phase = "idle"
        self.faults = Faults()
        self.final: tuple[Exit, str] | None = None  # leave and end instead of starting again
        self.decided: Decision | None = None
        self.reports: dict[int, Settled] = {}
        self._then: Literal["restart", "retry", "replace", "stop"] = "restart"
        self._reason = self._resume = ""
        self._turns = 0  # that the whole job has done, as those that reported know
        self._in_place = self._all_opened = False
        self._rewind = -1  # survivors go back to the state of this step that they have in memory
        self.is_vouched = False  # the decision's sources told what they hold, and it is equal, or need not
        self.unvouched: set[int] = set()  # sources whose word is awaited
        self.vouches: dict[int, StateDigests] = {}
        self._suspicion: Fault | None = None
        self._grown_on: frozenset[NodeId] = frozenset()
        self._rollcall, self._openings = AllOf(), AllOf()

    # ---------------------------------------------------------------- events

    def launch(self, now: float) -> None:
        """Start members for the first time, or again once nodes are there."""
        if self.phase == "idle":
            self.job.next_generation()
        self._go("launch")
        self._start(now)

    def join_started(self) -> None:
        """Library mode: the workers were started by someone else."""
        self._go("launch")

    def seated(self, opened: bool, in_place: bool) -> None:
        """A successor has seated the members of the log.

        Args:
            opened: it is known where their sessions began.
            in_place: they were told to go on, as far as the one before came with telling them.
        """
        self._all_opened = opened
        self._in_place = in_place

    def adopt(self, now: float) -> None:
        """A successor has heard from all agents: its members were started, and may have opened their sessions."""
        if self.phase != "idle":
            return
        self._go("launch")
        if self._all_opened:
            self._go("opened")
        self.progress(now)

    def member_fault(
        self, now: float, member: Member, kind: FaultKind, what: str, failure: Failure | None = None
    ) -> None:
        """A fault of one member, dated by its death if it is dead."""
        self.fault(now, Fault.of(member, kind, what, now, failure))

    def suspect(self, now: float, member: Member, seen: FaultSeen) -> None:
        """A collective broke: wait for a death that explains it."""
        if (self.phase, "suspect") not in PHASES:
            return
        self._go("suspect")
        self._suspicion = Fault.of(member, "collective", seen.what, now)
        self._suspicion.step = seen.step
        self.job.timer("grace", self.job.config.fault_grace_s)

    def fault(self, now: float, fault: Fault, *more: Fault) -> None:
        """Something is broken for good, ``more`` with it: joins the fence before the decision, else starts a new one.
        A newcomer that dies before it has joined is no peer yet: another one takes its seat."""
        if self.phase in ("leaving", "waiting"):
            return
        new = [*missed(now, self.job, self.faults, fault), fault, *more]
        member = self.job.roster.get(MemberId((fault := new[0]).member_id))
        newcomer = member if member is not None and member.joining else None
        if newcomer is not None:
            self.replacement.lost += 1
        for each in new:
            self.faults.add(each, now)
            self.job.record("detected", **each.identity(), what=each.what, detected_s=now - each.at_s)
        if self.phase == "fencing":
            self.progress(now)
        elif self.phase == "replacing" and newcomer is not None and self.replacement.again(newcomer):
            for phase in DECIDED:
                fault.passes(phase, now)
        else:
            self.fence(now, f"rank {fault.rank} {fault.what}")

    def opened(self, now: float) -> None:
        """A session opened. When it was the last one of this start, it is known where the job was restored
        to."""
        job = self.job
        members = job.roster.members
        if self._all_opened or len(members) < job.world_size:
            return
        if not self._openings.all(members, lambda m: m.opened_step is not None):
            return
        steps = [m.opened_step for m in members if m.opened_step is not None]
        self._all_opened = True
        if self.phase in ("retrying", "replacing", "saving", "leaving"):
            return  # said before the decision, heard after it: the decision knows better
        job.unequal = ""  # all stand at a state that was compared
        lost = max(0, job.step - min(steps))
        self.faults.cost(lost)
        job.base_step = job.step = min(steps)
        job.sealed_step = min(job.sealed_step, job.step)
        job.record("session_opened", step=job.step, root=job.root, generation=str(job.roster.generation))
        if min(steps) != max(steps):
            member = next(m for m in job.roster.members if m.opened_step == min(steps))
            what = f"ranks restored different steps: {min(steps)} to {max(steps)}"
            self.member_fault(now, member, "startup", what)
        elif self.phase == "starting":
            self._go("opened")
            self.faults.passes("restored", now)
            job.record("restored", step=job.step, steps_lost=lost, generation=str(job.generation))
            self.progress(now)

    def settled(self, now: float, member: Member, report: Settled) -> None:
        """An answer to the newest fence, or news after a decision was applied."""
        self.reports[member.rank] = report
        self._turns = max(self._turns, report.turns)
        member.state, member.step = report.state, report.step
        self.job.record(
            "settled",
            rank=member.rank,
            state=report.state,
            step=report.step,
            generation=str(report.generation),
        )
        self.faults.freed(report.freed_ns, now)
        if report.state == "torn" and self.phase in ("retrying", "replacing", "saving"):
            self.fence(now, f"the update of rank {member.rank} failed")
        elif report.away and self.phase in IN_PLACE:  # it fell after it had answered
            self.fence(now, f"rank {member.rank} has left its loop")
        elif self.phase in IN_PLACE and report.rewind < 0 <= self._rewind < report.step:
            self.fence(now, f"rank {member.rank} has left the loop that all go back into")
        else:
            self.progress(now)

    def offered(self, member: Member, offer: StateOffered) -> None:
        """A survivor serves its state."""
        if self.replacement.offered(member, offer) and self.phase == "replacing":
            for newcomer in filter(lambda m: m.joining, self.job.roster.living):
                self.remind(newcomer)

    def refused(self, now: float, member: Member, refusal: StateRefused) -> None:
        """What a rank has in memory is damaged, and gone now, or no newcomer can join: decide again without it."""
        self.job.record("state_refused", rank=member.rank, step=refusal.step, reason=refusal.reason)
        if refusal.alone:
            self.replacement.refusal = refusal.reason
        else:
            self.job.forget_held(member.rank)
        if self.phase == "replacing":
            self.fence(now, f"rank {member.rank} refuses its state: {refusal.reason}")

    def join_asked(self, member: Member) -> None:
        """A newcomer wants its state."""
        member.asked = True
        self.remind(member)

    def joined(self, now: float, member: Member, message: Joined) -> None:
        """A newcomer holds its state."""
        if self.phase != "replacing" or not member.joining:
            return
        self.settled(now, member, self.replacement.joined(member, message))

    def told(self, event: StateDigests, rank: int) -> bool:
        """A source told what it holds; True when it was the last one, before the decided state goes anywhere."""
        if self.phase not in ("saving", "replacing") or rank not in self.unvouched:
            return False
        self.unvouched.discard(rank)
        self.vouches[rank] = event
        return not self.unvouched

    def vouched(self) -> None:
        """They are equal, and all layouts are told: the state may be saved, and given to newcomers."""
        self.is_vouched = True
        self.bounds.end("vouch")
        if self.phase == "saving":
            self.gasp.plan()
            self.bounds.begin("gasp", self.job.gasp_s, reads=True)
        for member in self.job.roster.living:
            if member.joining or self.phase == "saving":
                self.remind(member)

    def save_reported(self, now: float, member: Member, report: SaveReported) -> None:
        """A source has written its share, or could not."""
        if self.phase != "saving":
            return
        outcome = self.gasp.reported(member.rank, report)
        if outcome == "sealed":
            self._resume = report.save_id.directory()
            self._go("sealed")
            self._leave(now, "the last-gasp checkpoint is saved")
        elif outcome == "failed":
            self.fence(now, f"the save failed: {self.gasp.error}")

    def exited(self, now: float, member: Member) -> None:
        """A member is gone, whatever the reason; ``fault`` was called before if it is one."""
        self.faults.exited(member)
        if self.phase == "saving" and (member.rank in self.gasp.writing or member.rank in self.unvouched):
            self.fence(now, f"rank {member.rank} is gone, its share of the save is not written")
        else:
            self.progress(now)

    def tick(self, now: float, name: str) -> None:
        """One of this machine's timers."""
        living = self.job.roster.living
        if name == "grace" and self.phase == "grace" and self._suspicion is not None:
            self.fault(now, self._suspicion)
        elif name == "quiesce-early" and self.phase == "fencing":
            for member in living:
                if member.opened_step is None and not self._all_opened and member.rank not in self.reports:
                    self.job.kill(member, "did not answer while starting")  # as expected: no session is open
        else:
            self.awaited.tick(name)

    def active(self, now: float, event: Active) -> None:
        """What an agent sees of the processes that a recovery may wait for."""
        self.awaited.active(now, event)

    def grow(self, now: float) -> None:
        """More ranks can run than do: all start again from a checkpoint written now, once for each set of nodes."""
        job = self.job
        if self.phase != "idle" or job.room() <= job.world_size or job.exit_source or not job.session:
            return
        nodes = frozenset(job.slots)
        if nodes == self._grown_on or any(m.finished for m in job.roster.members):
            return
        self._grown_on = nodes
        self.fence(now, f"there is room for {plural(job.room(), 'rank')}")

    def remind(self, member: Member) -> None:
        """Repeat the standing order to a member that reconnected."""
        message = self._standing_order(member)
        if message is not None:
            self.job.send(member, message)
        if isinstance(message, Receive):
            self.bounds.moved(member.member_id)  # its part begins now

    def progress(self, now: float) -> None:
        """Take whatever step the facts allow."""
        members, living = self.job.roster.members, self.job.roster.living
        have_all = self._rollcall.all
        if self.phase == "fencing":
            if have_all(living, self._has_answered) and not self._let_go():
                torn = [m for m in living if self.reports[m.rank].state == "torn"]
                if not self.replacement.remove(torn):
                    self._plan(now)
        elif self.phase == "retrying":
            if have_all(living, self.is_there):
                self._resume_in_place(now)
        elif self.phase == "replacing":
            if have_all(members, lambda m: m.alive and not m.joining and self.is_there(m)):
                self._resume_in_place(now)
        elif self.phase == "leaving":
            if not living:
                self._gone(now)
        elif self.phase == "starting":
            if self.faults.all and not self.job.session and have_all(members, lambda m: m.started):
                self._recovered(now)
        if self.phase == "resuming" and have_all(members, lambda m: m.reached or m.finished):
            self._go("reached")
            self.job.record("resumed", step=self.job.step, generation=str(self.job.generation))
            self._recovered(now)

    def _let_go(self) -> bool:
        """Let those whose code raised end, unless the others lack what they hold; True: wait until they are gone."""
        failed = [m for m in self.job.roster.living if m.stays]
        if not failed or self.survey.needs({m.rank for m in failed}, self.reports):
            return False
        for member in failed:
            self.reports.pop(member.rank)
            self.job.let_go(member)
        return True

    def fence(self, now: float, reason: str) -> None:
        """A new generation begins: everyone out of the old one."""
        job = self.job
        self._go("fault")
        self._suspicion, self.decided, self.reports, self._rewind, self._turns = None, None, {}, -1, 0
        job.reopen(reason)
        generation = job.next_generation()
        dead = [m.rank for m in job.roster.members if not m.alive or m.failed]
        self._reason = reason
        self.faults.passes("fenced", now)
        job.record("fenced", generation=str(generation), reason=reason, dead_ranks=dead)
        for name in ("grace", "startup"):
            job.cancel(name)
        self.bounds.end("retry", "vouch", "offer", "join", "gasp")
        for member in job.roster.living:
            if not member.said_hello or not self.replacement.holds(member):
                member.is_excused = True
                job.kill(member, "was not connected when the recovery began")
            elif member.failed is None or member.stays:
                self.remind(member)
        job.timer("quiesce-early", job.config.starting_quiesce_s)
        self.bounds.begin("quiesce", job.settle_s)
        self.progress(now)

    # ---------------------------------------------------------------- quiesced -> planned

    def _plan(self, now: float) -> None:
        job = self.job
        self.faults.passes("quiesced", now)
        job.record("quiesced", generation=str(job.generation), living=len(job.roster.living))
        decided = self.decided = decide(self.survey.reports(self.reports), job.sealed_here)
        if decided.step is not None:
            job.step = decided.step
        situation = self.survey.situation(decided, self.reports, self.faults.all)
        if job.ends is None:
            verdict = judge(now, situation, job.answered, job.config)
        else:
            verdict = msgspec.structs.replace(job.ends, save=job.ends.save and not situation.uncovered)
        counts = verdict.counts and not situation.again
        self.faults.passes("planned", now)
        job.record(
            "planned",
            generation=str(job.generation),
            step=job.step,
            in_doubt=decided.in_doubt,
            decision=decided.direction,
            sources=list(decided.sources),
            evidence=list(decided.evidence),
        )
        job.record(
            "verdict",
            action=verdict.action,
            reason=verdict.reason,
            evidence=list(verdict.evidence),
            rung=verdict.rung,
            refused=list(verdict.refused),
            step=job.step,
            memory_step=verdict.memory_step,
            counts=counts,
            at_s=now,
            digests=[failure.digest for failure in situation.failures],
            failed_steps=[failure.step for failure in situation.failures],
            occurrences=[failure.occurrence for failure in situation.failures],
        )
        if counts:
            failures = tuple(failure.mark for failure in situation.failures)
            job.answered.append(Answered(at_s=now, action=verdict.action, step=job.step, failures=failures))
        self._act(now, verdict, decided)

    # ---------------------------------------------------------------- planned -> restored

    def _act(self, now: float, verdict: LadderVerdict, decided: Decision) -> None:
        job = self.job
        self.final = None
        self._resume = ""
        self.gasp.order = None
        self.is_vouched = not (job.config.verify or verdict.save)
        self.vouches, self.unvouched = {}, set(decided.sources)
        self._then = "restart"
        if verdict.stops:
            job.ends = verdict
            self._then = "stop"
            self.final = (STOP_CODE[verdict.action], verdict.reason)
        elif verdict.action == "retry_in_place":
            self._then = "retry"
            self._go("retry")
            for member in job.roster.living:
                self.remind(member)
            self.bounds.begin("retry", job.gasp_s)
            self.progress(now)
            return
        elif verdict.action in ("replace", "replace_from_memory"):
            self._replace(verdict, decided)
            return
        elif verdict.action == "requeue":
            self.final = (Exit.REQUEUE, verdict.reason)
        elif verdict.action == "restart_from_memory":
            self._resume = memory_name(verdict.memory_step)
        elif job.config.library:
            self.final = (Exit.FAILED, verdict.reason)
        if not verdict.save:
            self._go("leave")
            self._leave(now, verdict.reason)
            return
        dead = {
            str(m.rank): local
            for m in job.roster.members
            if not m.alive and (local := self.replacement.local_of(m))
        }
        self.gasp.begin(self.gasp.sources(decided), dead)
        self._go("save")
        for member in job.roster.living:
            self.remind(member)
        self.bounds.begin("vouch", job.gasp_s, reads=True)

    def _replace(self, verdict: LadderVerdict, decided: Decision) -> None:
        job = self.job
        self._then = "replace"
        kept = verdict.action == "replace_from_memory" and not verdict.replays
        if kept and verdict.memory_step != decided.step:
            self._rewind = job.step = verdict.memory_step
            job.base_step = min(job.base_step, job.step)
        self._go("replace")
        self.bounds.end("quiesce")
        job.cancel("quiesce-early")
        if not self.is_vouched:
            self.bounds.begin("vouch", job.gasp_s, reads=True)
        self.replacement.start(decided.sources, kept=kept, replays=verdict.replays)
        for member in job.roster.living:
            self.remind(member)

    def _standing_order(self, member: Member) -> Message | None:
        job = self.job
        who, generation = member.member_id, job.generation
        if self.phase == "fencing":
            return Fence(member_id=who, generation=generation, reason=self._reason)
        if self.phase == "replacing" and member.joining:
            return self.replacement.receive(member, self._turns) if self.is_vouched else None
        if self.phase in ("saving", "retrying", "replacing"):
            if self.decided is None or not stands_in(self.decided.sources, member.rank):
                return None
            order = self.gasp.order if self.is_vouched else None
            assert self.decided.step is not None
            return Settle(
                member_id=who,
                generation=generation,
                step=self.decided.step,
                save=order if order is not None and stands_in(order.sources, member.rank) else None,
                then=self._then,
                rewind=self._rewind,
                vouch=not self.is_vouched and self.phase != "retrying",
                replays=self.phase == "replacing" and self.replacement.replays,
                turns=self._turns,
            )
        if self.phase == "resuming" and self._in_place:
            return ResumeInPlace(member_id=who, generation=generation, step=job.step, kv_node=job.kv_node)
        if self.phase == "leaving":
            code = self.final[0] if self.final else Exit.RESTART
            return Leave(member_id=who, generation=generation, code=int(code), reason=self._reason)
        return None

    def _has_answered(self, member: Member) -> bool:
        """Who is being killed may have answered before: it counts when it is gone."""
        if member.is_excused or (member.failed is not None and not member.stays):
            return False
        return member.rank in self.reports

    def is_there(self, member: Member) -> bool:
        """It stands at the step of the decision, or can go back to it."""
        report = self.reports.get(member.rank)
        if report is None or report.state not in ("ready", "aborted", "finished"):
            return False
        going_back = self._rewind >= 0 and self.decided is not None and report.step == self.decided.step
        return report.step == self.job.step or going_back

    def _resume_in_place(self, now: float) -> None:
        job = self.job
        self._go("agreed")
        self._in_place = True
        self.bounds.end("retry", "vouch", "offer", "join")
        job.cancel("startup")
        job.roster.generation = job.generation
        self.faults.passes("restored", now)
        job.record(
            "generation_started",
            generation=str(job.generation),
            attempt=job.attempts - 1,
            in_place=True,
            resume="",
            members=[int(m.member_id) for m in job.roster.members],
            nodes=[str(m.node_id) for m in job.roster.members],
            local_ranks=[m.local_rank for m in job.roster.members],
        )
        lost = 0
        if self._rewind >= 0 and self.decided is not None:
            self.replacement.went_back(self._rewind)
            lost = (self.decided.step or 0) - job.step
        self.faults.cost(lost)
        job.record("restored", step=job.step, steps_lost=lost, generation=str(job.generation))
        for member in job.roster.living:
            member.reached = False
            self.remind(member)
        self.progress(now)

    def _leave(self, now: float, reason: str) -> None:
        job = self.job
        self._reason = reason
        if job.exit_source and self.final is None:
            sealed = job.sealed_step >= job.step
            self.final = (Exit.REQUEUE if sealed else Exit.UNSAVED, f"asked to exit by {job.exit_source}")
        self.bounds.end("quiesce", "vouch", "gasp")
        job.cancel("quiesce-early")
        for member in job.roster.living:
            if job.session and member.said_hello:
                self.remind(member)
            else:
                job.kill(member, reason, grace_s=job.config.term_grace_s)
        if job.session:
            self.bounds.begin("leave", job.config.leave_s)
        self.progress(now)

    def _gone(self, now: float) -> None:
        self.bounds.end("leave")
        if self.final is not None:
            self.job.finish(*self.final)
            return
        self._go("gone")
        self._start(now)

    def _start(self, now: float) -> None:
        self._in_place = self._all_opened = False
        self.reports = {}
        self.replacement.clear()
        if not self.job.start_members(self._resume):
            self._go("no nodes")
            # On one node alone, no other one ever comes.
            self.job.timer("startup", self.job.config.startup_s if self.job.hosts else 0.0)

    # ---------------------------------------------------------------- restored -> resumed

    def _recovered(self, now: float) -> None:
        self.faults.passes("resumed", now)
        for summary in self.faults.end():
            self.job.record("recovered", **summary)
        self.replacement.clear()
        self.gasp.clear()

    def _go(self, event: str) -> None:
        target = PHASES.get((self.phase, event))
        if target is None:
            raise InternalError(f"{event!r} cannot happen in phase {self.phase!r} of a recovery")
        self.phase = target
