"""The evidence of one recovery, collected into the ``Situation`` from which the ladder chooses a rung.

Theory. The evidence is complete when every rank of the old generation has reported or is dead. It consists of these
reports, the faults so far, the layouts and the state of the nodes. The situation also holds, for each rung that cannot
be taken, the reason. This module decides nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from holdfast.core.decide.decision import Decision, RankReport, decide
from holdfast.core.decide.recovery_phases import NO_PAGE
from holdfast.core.decide.stop_policy import Failure, Situation
from holdfast.core.decide.unequal_batches import RankPlace, unequal
from holdfast.core.decide.unmatched_collectives import IN_BLOCK, RankSeen, unmatched
from holdfast.core.ids import MemberId
from holdfast.core.job.fault import Fault, FaultKind
from holdfast.core.job.job_state import Job
from holdfast.core.job.last_gasp import LastGaspSave
from holdfast.core.job.memory_tier import NONE, kept_by, newest_complete, replacement_step, replayed
from holdfast.core.job.replacement import Replacement
from holdfast.core.protocol.messages import Settled
from holdfast.text import noun_of, plural

CONSEQUENCES = frozenset({"PeerLost", "GroupError"})
"""Exceptions that the loss of a peer causes. They are never the cause of a fault."""


OWN_DOING = frozenset({"exception", "hang", "silent", "corruption"})
"""Kinds of faults that user code may cause. The kind ``silent`` is a kill by the controller that followed a fault."""

FAILURES_MAX = 16


class Survey:
    """The part of :class:`~holdfast.core.job.recovery.Recovery` that collects evidence.

    It shares the facts of the run (``job``), ``replacement`` and ``gasp`` with the recovery.
    """

    def __init__(self, job: Job, replacement: Replacement, gasp: LastGaspSave) -> None:
        self.job = job
        self.replacement = replacement
        self.gasp = gasp

    def reports(self, answers: Mapping[int, Settled]) -> list[RankReport]:
        """Return the state and step of each rank of the old generation. Ranks without any known state are left out.

        Args:
            answers: the answers to the newest fence, by rank.
        """
        found: list[RankReport] = []
        for member in self.job.roster.members:
            answer = answers.get(member.rank)
            if member.alive and member.joining:
                continue  # not a full member before it has joined
            if member.alive and answer is not None:
                found.append(RankReport(member.rank, answer.state, answer.step, True))
            elif member.exited is not None and member.exited.detail != NO_PAGE:
                found.append(RankReport(member.rank, member.exited.state, member.exited.step, False))
        return found + self.replacement.reports()

    def situation(
        self, decided: Decision, answers: Mapping[int, Settled], faults: Sequence[Fault]
    ) -> Situation:
        """Return all facts that the ladder may use to choose a rung."""
        job = self.job
        members, room = job.roster.members, job.room()
        finished = self._finished(answers)
        no_holder = self._why_no_holder(decided.sources)
        not_beside = self._why_not_beside(decided, answers)
        return Situation(
            step=job.step or None,
            base_step=job.base_step,
            session=job.session,
            all_alive=all(m.alive for m in members),
            all_sound=decided.step is not None
            and decided.sound
            and len(finished) in (0, len(members))
            and not self._away(answers)
            and not job.unequal,
            uncovered=self._why_uncovered(decided, no_holder),
            checkpoint_known=job.sealed_step >= 0
            or job.base_step > 0
            or any(m.exited is not None and m.exited.staged_step > 0 for m in members)
            or self.replacement.staged,
            minority=bool(job.config.alone),
            left=job.agreed_step is not None and job.agreed_step == job.step <= job.sealed_step,
            unreplaceable=not_beside or no_holder,
            apart=self.replacement.refusal,
            unequal=job.unequal,
            memory_here=NONE if not_beside or self._unpublished() else self._memory_here(decided, answers),
            memory_step=self._memory_step(decided, answers),
            replayed=not (not_beside or self._unpublished())
            and replayed(decided, members, answers, job.held_elsewhere()),
            failures=tuple(
                filter(None, (self._unequal(answers), self._unmatched(answers), *_failures(faults)))
            ),
            fewer=f"there is room for {room} of {plural(job.world_size, 'rank')}"
            if room < job.world_size
            else "",
            lost_nodes=tuple(sorted({str(m.node_id) for m in members if not m.alive} - job.heard())),
            causes=tuple(sorted({self._cause_of(f) for f in faults})),
            planned=bool(faults) and all(fault.kind == "leave" for fault in faults),
            exits=f"asked to exit ({job.exit_source})" if job.exit_source else "",
            again=self.gasp.failures > 0 and all("planned" in f.passed for f in faults),
            room=f"there is room for {plural(room, 'rank')}, {job.world_size} now"
            if room > job.world_size
            else "",
        )

    def _why_uncovered(self, decided: Decision, no_holder: str) -> str:
        """Return why no last-gasp checkpoint can be complete; empty if one can be.

        Args:
            no_holder: why the sources of the decision do not hold the whole state; empty if they hold it.
        """
        job, gasp = self.job, self.gasp
        sources = gasp.sources(decided)
        if job.unequal:
            return job.unequal
        if not job.root:
            return "no session has reported where to save"
        if not sources:
            return f"no living rank holds the state of step {job.step}"
        if gasp.failures >= job.config.save_attempts_max:
            return f"{plural(gasp.failures, 'attempt')} failed, the last one: {gasp.error}"
        uncovered = no_holder if sources == decided.sources else self._why_no_holder(sources)
        return f"{uncovered} (save failed before: {gasp.error})" if uncovered and gasp.error else uncovered

    def _why_not_beside(self, decided: Decision, answers: Mapping[int, Settled]) -> str:
        """Return why the lost ranks cannot be replaced while the survivors keep their processes; empty if they can.

        The reason does not depend on the source of the state: living ranks or the memory tier.
        """
        if self.job.unequal:
            return self.job.unequal
        if away := self._away(answers) or self._finished(answers):
            return f"rank {min(away)} is not inside its loop"
        return self.replacement.why_not(decided)

    def _finished(self, answers: Mapping[int, Settled]) -> list[int]:
        """Return the ranks whose training is done.

        The report of a rank (``Finished``) may come after its answer to the fence, for example from the agent that
        follows a dead agent.
        """
        of = {answer.member_id for answer in answers.values() if answer.state == "finished"}
        return [m.rank for m in self.job.roster.members if m.finished is not None or m.member_id in of]

    def _away(self, answers: Mapping[int, Settled]) -> list[int]:
        """Return the living ranks that have left their loop.

        An answer that a rank gave before it died is ignored, because its replacement may be inside the loop.
        """
        of = {answer.member_id for answer in answers.values() if answer.away}
        return [m.rank for m in self.job.roster.living if m.member_id in of]

    def _memory_here(self, decided: Decision, answers: Mapping[int, Settled]) -> int:
        job = self.job
        return replacement_step(decided, job.roster.members, answers, job.held_elsewhere(), job.sealed_step)

    def _memory_step(self, decided: Decision, answers: Mapping[int, Settled]) -> int:
        job = self.job
        if job.config.alone or job.unequal:
            return NONE
        # Without a decided step, the fault came before any session had opened again.
        limit = job.step if decided.step is None else decided.step
        step = newest_complete(kept_by(job.roster.members, answers, job.held_elsewhere()), limit)
        return step if step >= job.sealed_step else NONE

    def _unequal(self, answers: Mapping[int, Settled]) -> Failure | None:
        """Return the proof that one rank has ended its loop over steps, and another rank has a further batch.

        The result is None if there is no proof.
        """
        found = []
        for member in self.job.roster.living:
            answer = answers.get(member.rank)
            if answer is not None and answer.member_id == member.member_id:
                found.append(RankPlace(member.rank, answer.state, answer.step, answer.loop))
        return unequal(self.job.roster.generation, found)

    def _unmatched(self, answers: Mapping[int, Settled]) -> Failure | None:
        """Return the proof that a replacement makes other collectives between two steps than another rank.

        The result is None if there is no proof.
        """
        found = []
        for member in self.job.roster.members:
            answer = answers.get(member.rank) if member.alive else member.exited
            if answer is not None and answer.member_id == member.member_id:
                begun = answer.state in IN_BLOCK
                found.append(RankSeen(member.rank, member.member_id, begun, answer.step, answer.outside))
        return unmatched(self.job.roster.generation, found)

    def needs(self, ranks: set[int], answers: Mapping[int, Settled]) -> bool:
        """Return whether the state of the decided step is incomplete without the boxes of ``ranks``.

        ``answers``: the answers to the newest fence, by rank.
        """
        decided = decide(self.reports(answers), self.job.sealed_here)
        others = tuple(rank for rank in decided.sources if rank not in ranks)
        return bool(decided.step) and (not others or bool(self._why_no_holder(others)))

    def _why_no_holder(self, sources: tuple[int, ...]) -> str:
        if missing := self._unpublished():
            return f"{noun_of(len(missing), 'rank')} {', '.join(map(str, missing[:8]))} published no layout"
        return self.job.uncovered(self.job.roster.all_layouts(), sources)

    def _cause_of(self, fault: Fault) -> str:
        member = self.job.roster.get(MemberId(fault.member_id))
        gone = member is not None and member.exited is not None and member.exited.detail == NO_PAGE
        return "node" if gone else CAUSE_OF.get(fault.kind, "other")

    def _unpublished(self) -> list[int]:
        """Return the ranks without a known layout.

        A newcomer in such a seat cannot be sent the boxes that it has to hold.
        """
        return [rank for rank in range(self.job.world_size) if rank not in self.job.roster.layouts]


CAUSE_OF: dict[FaultKind, str] = {
    "signal": "crash",
    "exit": "crash",
    "exception": "crash",
    "device": "device",
    "startup": "crash",
    "hang": "hang",
    "silent": "hang",
    "collective": "network",
    "corruption": "corruption",
    "leave": "node",
}
"""The cause in ``--on-fault cause:rung`` for each kind of fault. Every other kind has the cause ``other``."""


def _failures(faults: Sequence[Fault]) -> tuple[Failure, ...]:
    """Return the failures that caused this recovery, without repetitions of the same failure on other ranks.

    These are the failures of dead ranks. If no rank died, all failures count. Two kinds do not count: exceptions
    caused by a lost peer and, if a rank died, members that left because of the fence. An error that the user has to
    fix is first in the result, even if a rank died: every start would raise it again.
    """
    found = [f for f in faults if "planned" not in f.passed]
    wrong = [f for f in found if f.failure and f.failure.user_error]
    died = [f for f in found if f.kind not in OWN_DOING and not f.follows]
    causes = [
        f.failure for f in (*wrong, *(died or found)) if f.failure and f.failure.kind not in CONSEQUENCES
    ]
    distinct: dict[tuple[str, int], Failure] = {}
    for failure in causes:
        distinct.setdefault((failure.digest, failure.step), failure)
    return tuple(distinct.values())[:FAILURES_MAX]
