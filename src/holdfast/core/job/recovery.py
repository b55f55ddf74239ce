"""The state machine of a recovery: from the first sign of a fault to a committed step of all ranks.

Theory. A recovery is in one phase (``core/decide/recovery_phases.py``). The phase determines the order that each member
receives and the condition that ends the phase. The decision is kept as one value, the plan. Users see six phases
(detected, fenced, quiesced, planned, restored, resumed): each one is reached at a transition of this state machine. The
pure function ``decide`` computes the step of the job from the reports of the ranks of the old generation. For a dead
rank its status page is the report. A second fault before the decision becomes part of the same recovery. A second fault
after the decision starts the recovery again at the fence, under a new generation. All orders are idempotent by
generation, so ``remind`` may repeat an order to a member that has connected again.

Terms. A *source* is a rank that holds the state of the decided step and saves it or gives it to replacements. A rank
*leaves* when its process ends on the controller's order.

Invariants:
1. A decision is made only when each rank of the old generation has reported to the newest fence or is confirmed dead,
   and only while a majority of the voters is heard.
2. There is one decision per generation, and it is recorded before any order is sent.
3. The step of the job is never below a step that a living rank has committed. If the update of step s is the newest one
   that some rank has begun, the step of the job is at most s + 1.
4. Only ranks that are at the decided step, or can be brought there, are sources of a save.
5. New members start only when every old member is gone, or as replacements of dead members beside the survivors.
6. A newcomer is a full member from its message ``SessionOpened`` on: from then on it holds its state. A fault before
   that removes the newcomer.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from holdfast.core.decide.decision import decide, stands_in
from holdfast.core.decide.ladder import judge
from holdfast.core.decide.recovery_phases import PHASES, RULES, Phase, PhaseRules, RecoveryEvent
from holdfast.core.decide.stop_policy import UNMATCHED, Answered, Failure
from holdfast.core.ids import MemberId, NodeId
from holdfast.core.job.awaited import Awaited
from holdfast.core.job.completion import AllOf, SessionOpenings
from holdfast.core.job.early_exits import missed
from holdfast.core.job.fault import Fault, FaultKind, Faults, Seen
from holdfast.core.job.job_state import Job
from holdfast.core.job.last_gasp import LastGaspSave
from holdfast.core.job.membership import Member
from holdfast.core.job.node_faults import count_fault
from holdfast.core.job.recovery_plan import STAY, RecoveryPlan
from holdfast.core.job.replacement import Replacement
from holdfast.core.job.situation import Survey
from holdfast.core.job.source_digests import SourceDigests
from holdfast.core.job.wait_bounds import Bounds
from holdfast.core.protocol.health_messages import StateDigests
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

DECIDED: tuple[Seen, ...] = ("fenced", "quiesced", "planned")
"""Phases that the fault of a newcomer has passed from the beginning, because the decision to start it still holds."""


class Recovery:
    """The state machine inside the controller that handles faults.

    It shares the facts of the run (``job``) with the controller.
    """

    def __init__(self, job: Job) -> None:
        self.job = job
        self.bounds = Bounds(job)
        self.replacement = Replacement(job, self.bounds)
        self.gasp = LastGaspSave(job)
        self.survey = Survey(job, self.replacement, self.gasp)
        self.awaited = Awaited(job, self)
        self.phase: Phase = "idle"
        self.plan: RecoveryPlan | None = None  # of this generation; None before the decision
        self.faults = Faults()
        self.digests = SourceDigests()
        self.reports: dict[int, Settled] = {}
        self.openings = SessionOpenings()
        self._turns = 0  # epochs and phases finished by the whole job: the maximum of the reports
        self._reason = ""  # the reason in the newest order to fence or to leave
        self._resume = ""  # state that all ranks start from; empty: the newest checkpoint
        self._outcome = (Exit.RESTART, "")  # exit code and reason with which all ranks leave
        self._grown_on: frozenset[NodeId] = frozenset()
        self._rollcall = AllOf()

    @property
    def rules(self) -> PhaseRules:
        """The rules of the current phase."""
        return RULES[self.phase]

    @property
    def only_replaces(self) -> bool:
        """True while replacements start, and take their state from living ranks."""
        replaces = self.plan is not None and self.plan.verdict.action == "replace"
        return replaces and self.phase in ("preparing", "replacing")

    @property
    def ends(self) -> bool:
        """True while the last checkpoint of the run is compared or written, or all ranks leave after it."""
        ends = self.plan is not None and self.plan.end(library=self.job.config.library) is not None
        return ends and self.phase in ("comparing", "saving", "ending")

    # ---------------------------------------------------------------- events

    def launch(self, now: float) -> None:
        """Start the members: for the first time, or because enough nodes are connected again."""
        if self.phase == "idle":
            self.job.next_generation()
        self._go("launch")
        self._start(now)

    def join_started(self) -> None:
        """Enter the starting phase without starting members. In library mode another launcher starts the workers."""
        self._go("launch")

    def adopt(self, now: float, *, in_place: bool) -> None:
        """Continue the phase of an earlier controller, after all agents have reported to this controller.

        The members have been started. Their sessions may be open.

        Args:
            in_place: the newest order was to continue in place; some members may not have received it.
        """
        if self.phase != "idle":
            return
        self._go("launch")
        if in_place:
            self._go("adopted_in_place")
        elif self.openings.complete:
            self._go("opened")
        self.progress(now)

    def member_fault(
        self, now: float, member: Member, kind: FaultKind, what: str, failure: Failure | None = None
    ) -> None:
        """Handle a fault of one member. If the member is dead, the time of the fault is the time of the death."""
        self.fault(now, Fault.of(member, kind, what, now, failure))

    def suspect(self, now: float, member: Member, seen: FaultSeen) -> None:
        """Handle a broken collective: wait ``fault_grace_s`` for a death that explains it."""
        if (self.phase, "suspect") not in PHASES:
            return
        self._go("suspect")
        self.faults.suspect(member, seen, now)
        self.job.timer("grace", self.job.config.fault_grace_s)

    def fault(self, now: float, fault: Fault, *more: Fault) -> None:
        """Handle a fault that is certain, not only suspected, and the faults in ``more`` together with it.

        Before the decision the fault becomes part of the current fence. After the decision it causes a new fence. A
        newcomer that dies before it has joined causes no fence if another newcomer can take its seat.
        """
        if (self.phase, "fault") not in PHASES:
            return
        new = [*missed(now, self.job, self.faults, fault), fault, *more]
        member = self.job.roster.get(MemberId((fault := new[0]).member_id))
        newcomer = member if member is not None and member.joining else None
        if newcomer is not None:
            self.replacement.lost += 1
        for each in new:
            self.faults.add(each, now)
            self.job.record("detected", **each.identity(), what=each.what, detected_s=now - each.at_s)
            if (failed := self.job.roster.get(MemberId(each.member_id))) is not None:
                count_fault(now, self.job, failed, each)
        if self.phase == "fencing":
            self.progress(now)
        elif self.rules.then == "replace" and newcomer is not None and self.replacement.again(newcomer):
            for phase in DECIDED:
                fault.passes(phase, now)
        else:
            self.fence(now, f"rank {fault.rank} {fault.what}")

    def opened(self, now: float) -> None:
        """Handle the opening of a session.

        When all sessions are open, the smallest of their steps is the step to which the job was restored.
        """
        job = self.job
        members = job.roster.members
        if not self.openings.check(members, job.world_size):
            return
        if self.rules.order in ("settle", "leave"):
            return  # the report was sent before the decision and received after it: the decision is newer
        steps = [m.opened_step for m in members if m.opened_step is not None]
        lost = max(0, job.step - min(steps))
        self.faults.cost(lost)
        job.restored(min(steps))
        job.record("session_opened", step=job.step, root=job.root, generation=str(job.roster.generation))
        if min(steps) != max(steps):
            member = next(m for m in members if m.opened_step == min(steps))
            what = f"ranks restored different steps: {min(steps)} to {max(steps)}"
            self.member_fault(now, member, "startup", what)
        elif self.phase == "starting":
            self._go("opened")
            self.faults.passes("restored", now)
            job.record("restored", step=job.step, steps_lost=lost, generation=str(job.generation))
            self.progress(now)

    def settled(self, now: float, member: Member, report: Settled) -> None:
        """Handle a member's report: its answer to the newest fence, or a change of its state after the decision."""
        self.reports[member.rank] = report
        self._turns = max(self._turns, report.turns)
        member.report(report.state, report.step)
        self.job.record(
            "settled",
            rank=member.rank,
            state=report.state,
            step=report.step,
            generation=str(report.generation),
        )
        self.faults.freed(report.freed_ns, now)
        rewind = STAY if self.plan is None else self.plan.rewind
        if report.state == "torn" and self.rules.order == "settle":
            self.fence(now, f"the update of rank {member.rank} failed")
        elif report.away and self.rules.in_place:  # the rank left the loop after it had answered the fence
            self.fence(now, f"rank {member.rank} has left its loop")
        elif self.rules.in_place and report.rewind < 0 <= rewind < report.step:
            self.fence(now, f"rank {member.rank} has left the loop that all go back into")
        else:
            self.progress(now)

    def offered(self, member: Member, offer: StateOffered) -> None:
        """Record the offer of a survivor to serve its state.

        When all sources have offered, send the newcomers the order to receive.
        """
        if self.replacement.offered(member, offer) and self.phase == "replacing":
            for newcomer in filter(lambda m: m.joining, self.job.roster.living):
                self.remind(newcomer)

    def refused(self, now: float, member: Member, refusal: StateRefused) -> None:
        """Handle a refusal: the state in the memory of a rank is damaged, or the ranks cannot continue in place.

        A new fence then leads to another decision, without that state or without these processes.
        """
        self.job.record("state_refused", rank=member.rank, step=refusal.step, reason=refusal.reason)
        if refusal.alone:
            self.replacement.refusal = refusal.reason
        else:
            self.job.forget_held(member.rank)
        if self.rules.then == "replace":
            self.fence(now, f"rank {member.rank} refuses its state: {refusal.reason}")
        elif refusal.alone and self.phase == "resuming_in_place":
            self.fence(now, f"rank {member.rank} cannot continue in place: {refusal.reason}")

    def join_asked(self, member: Member) -> None:
        """Handle the request of a newcomer for its state."""
        member.asked = True
        self.remind(member)

    def joined(self, now: float, member: Member, message: Joined) -> None:
        """Handle the report of a newcomer that it holds its state."""
        if self.rules.then != "replace" or not member.joining:
            return
        self.settled(now, member, self.replacement.joined(member, message))

    def digests_reported(self, rank: int, event: StateDigests) -> Mapping[int, StateDigests] | None:
        """Record the digests that a source reports.

        Returns: the digests of all sources by rank if this report was the last one; otherwise None.
        """
        complete = self.rules.compares and self.digests.report(rank, event)
        return self.digests.by_rank if complete else None

    def digests_equal(self) -> None:
        """Start the save or the transfer of the state, because all layouts are published and the digests are equal."""
        saves = self.phase == "comparing"
        self._go("save" if saves else "replace")
        self.bounds.end("vouch")
        if saves:
            self.gasp.plan()
            self.bounds.begin("gasp", self.job.gasp_s, reads=True)
        for member in self.job.roster.living:
            if member.joining or saves:
                self.remind(member)

    def save_reported(self, now: float, member: Member, report: SaveReported) -> None:
        """Handle the report of a source that it has written its share of the save, or could not."""
        if self.phase != "saving":
            return
        outcome = self.gasp.reported(member.rank, report)
        if outcome == "sealed":
            self._leave(now, "the last-gasp checkpoint is saved", report.save_id.directory())
        elif outcome == "failed":
            self.fence(now, f"the save failed: {self.gasp.error}")

    def exited(self, now: float, member: Member) -> None:
        """Handle the end of a member's process. If that end is a fault, ``fault`` was called before."""
        self.faults.exited(member)
        awaited = member.rank in self.gasp.writing or member.rank in self.digests.awaited
        if self.phase in ("comparing", "saving") and awaited:
            self.fence(now, f"rank {member.rank} is gone, its share of the save is not written")
        else:
            self.progress(now)

    def tick(self, now: float, name: str) -> None:
        """Handle a timer of this state machine, named ``name``."""
        living = self.job.roster.living
        if name == "grace" and self.phase == "grace" and self.faults.suspected is not None:
            self.fault(now, self.faults.suspected)
        elif name == "quiesce-early" and self.phase == "fencing":
            for member in living:
                if (
                    member.opened_step is None
                    and not self.openings.complete
                    and member.rank not in self.reports
                ):
                    self.job.kill(member, "did not answer while starting")  # it cannot without a session
        else:
            self.awaited.tick(name)

    def stop(self) -> None:
        """Stop deciding and starting members, because the run was ended from outside."""
        self._go("stop")

    def grow(self, now: float) -> None:
        """Restart all ranks from a checkpoint written now, if the nodes have room for more ranks.

        This is tried once for each set of nodes.
        """
        job = self.job
        if self.phase != "idle" or job.room() <= job.world_size or job.exit_source or not job.session:
            return
        nodes = frozenset(job.slots)
        if nodes == self._grown_on or any(m.finished for m in job.roster.members):
            return
        self._grown_on = nodes
        self.fence(now, f"there is room for {plural(job.room(), 'rank')}")

    def remind(self, member: Member) -> None:
        """Send the order of the current phase to a member. Repeated orders are harmless."""
        message = self._standing_order(member)
        if message is not None:
            self.job.send(member, message)
        if isinstance(message, Receive):
            self.bounds.moved(member.member_id)  # the time limit of its transfer begins now

    def progress(self, now: float) -> None:
        """End the current phase if the condition for its end holds."""
        members, living = self.job.roster.members, self.job.roster.living
        have_all = self._rollcall.all
        match self.rules.until:
            case "answered":
                may_decide = self.job.decides and not self.job.roster.adopting
                if may_decide and have_all(living, self._has_answered) and not self._let_go():
                    torn = [m for m in living if self.reports[m.rank].state == "torn"]
                    if not self.replacement.remove(torn):
                        self._plan(now)
            case "there" if have_all(living, self.is_there):
                self._resume_in_place(now)
            case "joined" if have_all(members, lambda m: m.alive and not m.joining and self.is_there(m)):
                self._resume_in_place(now)
            case "gone" if not living:
                self._gone(now)
            case "started" if self.faults.all and not self.job.session:
                if have_all(members, lambda m: m.started):
                    self._recovered(now)
            case "reached" if have_all(members, lambda m: m.reached or m.finished):
                self._go("reached")
                self.job.record("resumed", step=self.job.step, generation=str(self.job.generation))
                self._recovered(now)

    def _let_go(self) -> bool:
        """Order members to end after an exception in their user code. Keep them if only they hold a part of the state.

        Returns: True if the recovery must wait until these members are gone.
        """
        failed = [m for m in self.job.roster.living if m.stays]
        if not failed or self.survey.needs({m.rank for m in failed}, self.reports):
            return False
        for member in failed:
            self.reports.pop(member.rank)
            self.job.let_go(member)
        return True

    def fence(self, now: float, reason: str) -> None:
        """Begin a new generation and order all living members to leave the collectives of the old one."""
        job = self.job
        self._go("fault")
        self.plan, self.reports, self._turns = None, {}, 0
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
                job.kill(member, "was not connected when the recovery began", excused=True)
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
        decided = decide(self.survey.reports(self.reports), job.sealed_here)
        job.decide(decided.step)
        situation = self.survey.situation(decided, self.reports, self.faults.all)
        if job.ends is None:
            verdict = judge(now, situation, job.answered, job.config)
        else:
            verdict = msgspec.structs.replace(job.ends, save=job.ends.save and not situation.uncovered)
        counts = verdict.counts and not (situation.again or situation.planned)
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
            unmatched=[failure.line for failure in situation.failures if failure.kind == UNMATCHED],
        )
        if counts:
            failures = tuple(failure.mark for failure in situation.failures)
            job.answered.append(Answered(at_s=now, action=verdict.action, step=job.step, failures=failures))
        self.plan = RecoveryPlan(decided, verdict)
        self._act(now, self.plan)

    # ---------------------------------------------------------------- planned -> restored

    def _act(self, now: float, plan: RecoveryPlan) -> None:
        job, verdict = self.job, plan.verdict
        if verdict.stops:
            job.ends = verdict
        if verdict.action == "retry_in_place":
            self._go("retry")
            self._remind_all()
            self.bounds.begin("retry", job.gasp_s)
            self.progress(now)
        elif verdict.action in ("replace", "replace_from_memory"):
            self._replace(plan)
        elif verdict.save:
            self._save(plan)
        else:
            self._leave(now, verdict.reason, plan.resume)

    def _save(self, plan: RecoveryPlan) -> None:
        job = self.job
        dead = {
            str(m.rank): local
            for m in job.roster.members
            if not m.alive and (local := self.replacement.local_of(m))
        }
        self.gasp.begin(self.gasp.sources(plan.decided), dead)
        self.digests.ask(plan.decided.sources)
        self._go("compare_to_save")
        self._remind_all()
        self.bounds.begin("vouch", job.gasp_s, reads=True)

    def _replace(self, plan: RecoveryPlan) -> None:
        job = self.job
        if plan.rewind != STAY:
            job.go_back(plan.rewind)
        self._go("compare_to_replace" if job.config.verify else "replace")
        self.bounds.end("quiesce")
        job.cancel("quiesce-early")
        if self.rules.compares:
            self.digests.ask(plan.decided.sources)
            self.bounds.begin("vouch", job.gasp_s, reads=True)
        self.replacement.start(plan)
        self._remind_all()

    def _remind_all(self) -> None:
        for member in self.job.roster.living:
            self.remind(member)

    def _standing_order(self, member: Member) -> Message | None:
        """Return the message that the current phase prescribes for a member; None if it prescribes no message."""
        rules, job = self.rules, self.job
        member_id, generation = member.member_id, job.generation
        replacement = member.joining and rules.to_replacement is not None
        match rules.to_replacement if replacement else rules.order:
            case "fence":
                return Fence(member_id=member_id, generation=generation, reason=self._reason)
            case "settle":
                return self._settle_order(member)
            case "receive":
                assert self.plan is not None
                return self.replacement.receive(member, self.plan, self._turns)
            case "resume":
                return ResumeInPlace(
                    member_id=member_id, generation=generation, step=job.step, kv_node=job.kv_node
                )
            case "leave":
                code, why = int(self._outcome[0]), self._outcome[1] or self._reason
                return Leave(member_id=member_id, generation=generation, code=code, reason=why)
        return None

    def _settle_order(self, member: Member) -> Settle | None:
        plan, rules = self.plan, self.rules
        assert plan is not None and plan.decided.step is not None and rules.then
        if not stands_in(plan.decided.sources, member.rank):
            return None
        order = self.gasp.order if self.phase == "saving" else None
        return Settle(
            member_id=member.member_id,
            generation=self.job.generation,
            step=plan.decided.step,
            save=order if order is not None and stands_in(order.sources, member.rank) else None,
            then="stop" if rules.then == "restart" and plan.verdict.stops else rules.then,
            rewind=plan.rewind,
            vouch=rules.compares,
            replays=rules.then == "replace" and plan.verdict.replays,
            turns=self._turns,
        )

    def _has_answered(self, member: Member) -> bool:
        """Return whether a member has answered the fence. A member that is being killed counts only once it is gone."""
        if member.is_excused or (member.failed is not None and not member.stays):
            return False
        return member.rank in self.reports

    def is_there(self, member: Member) -> bool:
        """Return whether a member is at the step of the decision, or can go back to that step."""
        report = self.reports.get(member.rank)
        if report is None or report.state not in ("ready", "aborted", "finished"):
            return False
        plan = self.plan
        going_back = plan is not None and plan.rewind != STAY and report.step == plan.decided.step
        return report.step == self.job.step or going_back

    def _resume_in_place(self, now: float) -> None:
        job = self.job
        self._go("agreed")
        self.bounds.end("retry", "vouch", "offer", "join")
        job.cancel("startup")
        job.roster.renew(job.generation)
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
        if self.plan is not None and self.plan.rewind != STAY:
            self.replacement.went_back(self.plan.rewind)
            lost = (self.plan.decided.step or 0) - job.step
        self.faults.cost(lost)
        job.record("restored", step=job.step, steps_lost=lost, generation=str(job.generation))
        for member in job.roster.living:
            member.resume()
            self.remind(member)
        self.progress(now)

    def _leave(self, now: float, reason: str, resume: str) -> None:
        """Order all members to leave.

        After that the run ends, or all ranks start again from the state named ``resume``.
        """
        job = self.job
        assert self.plan is not None
        end = self.plan.end(library=job.config.library)
        if job.exit_source and end is None:
            sealed = job.sealed_step >= job.step
            end = (Exit.REQUEUE if sealed else Exit.UNSAVED, f"asked to exit by {job.exit_source}")
        self._go("leave" if end is None else "end")
        self._outcome, self._reason, self._resume = end or (Exit.RESTART, ""), reason, resume
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
        if self.phase == "ending":
            self.job.finish(*self._outcome)
            return
        self._go("gone")
        self._start(now)

    def _start(self, now: float) -> None:
        self.openings.begin()
        self.reports = {}
        self.replacement.clear()
        if not self.job.start_members(self._resume):
            self._go("no_nodes")
            # In a job of one node, no other node will connect.
            self.job.timer("startup", self.job.config.startup_s if self.job.hosts else 0.0)

    # ---------------------------------------------------------------- restored -> resumed

    def _recovered(self, now: float) -> None:
        self.faults.passes("resumed", now)
        for summary in self.faults.end():
            self.job.record("recovered", **summary)
        self.replacement.clear()
        self.gasp.clear()

    def _go(self, event: RecoveryEvent) -> None:
        target = PHASES.get((self.phase, event))
        if target is None:
            raise InternalError(f"{event!r} cannot happen in phase {self.phase!r} of a recovery")
        self.phase = target
