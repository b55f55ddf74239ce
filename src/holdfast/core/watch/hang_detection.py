"""The handling of a job without progress: evidence is collected, a rank is named, and a fault is reported.

Theory. An agent reports when all workers of its node are stalled, and when one of them moves again. The job is stalled
only when every node with a living worker has reported a stall. Then evidence is collected from all nodes, a pure
function names the culprit, and an ordinary fault follows. The kill comes last: if a worker moves while evidence is
collected, no rank is named or killed. Slow ranks are handled in ``core/watch/stragglers.py``.

While newcomers start, the other ranks wait for the control plane. Each newcomer is judged alone until it asks for its
state. After that it may be waiting for others, and only a stopped process is evidence.

A process that exceeds a time limit of a recovery is killed for this reason (``Job.time_out``). Its agent first collects
evidence about the process, which is logged as for every other hang.

Invariants:
1. No process is killed for lack of progress before evidence that names it is in the log. If a process is killed
   because it did not answer, evidence about it is collected first, and logged before its death.
2. During a recovery only newcomers are judged here: the recovery has timers for all members.
"""

from __future__ import annotations

from collections.abc import Sequence

from holdfast.core.decide.stop_policy import HANG, Failure
from holdfast.core.ids import NodeId
from holdfast.core.job.fault import Fault
from holdfast.core.job.job_state import Job
from holdfast.core.job.membership import Member
from holdfast.core.job.recovery import Recovery
from holdfast.core.protocol.health_messages import (
    LAST_LOOK,
    CollectEvidence,
    Evidence,
    Late,
    ProgressResumed,
    RankEvidence,
    Stalled,
)
from holdfast.core.protocol.messages import Field
from holdfast.core.watch.hang_attribution import PLACE, HangVerdict, blame, where

LINES_MAX = 64
GATHER_S = 3.0  # an agent answers within this time, or the verdict is made without its evidence
PATIENCE_S = 2.0  # until the next look when no rank is to blame; doubled each time


class Hangs:
    """The part of the controller that handles hangs.

    It shares the facts of the run (``job``) with the controller.
    """

    def __init__(self, job: Job, recovery: Recovery) -> None:
        self.job = job
        self.recovery = recovery
        self._stalled: dict[NodeId, Stalled] = {}
        self._evidence: dict[NodeId, Evidence] | None = None
        self._number = 0
        self._waits = 0
        self._late: Late | None = None  # the late process about which evidence is awaited

    def stalled(self, now: float, event: Stalled) -> None:
        """Handle the report that all workers of one node are stalled."""
        if event.generation != self.job.roster.generation or not self.recovery.rules.trains:
            return
        if not self._is_evident(event):
            return
        self._stalled[event.node_id] = event
        nodes = self.job.roster.nodes
        if self._evidence is not None or self._waits or not nodes or not nodes <= self._stalled.keys():
            return
        self.job.record(
            "stalled",
            idle_s=round(self._idle_s(), 3),
            bound_s=round(max(s.bound_s for s in self._stalled.values()), 3),
            step_s=round(max(s.step_s for s in self._stalled.values()), 6),
        )
        self._gather()

    def _is_evident(self, event: Stalled) -> bool:
        """Return True if the stall is evidence of a hang.

        In a script without a session, only two signs show a hang: a rank waits in a collective, or its process is
        stopped.
        """
        return self.job.session or event.waiting or event.stopped

    def late(self, event: Late) -> None:
        """Handle the report that the start of a process is too slow.

        If the process is a newcomer, collect evidence about it.
        """
        if self._late is not None or self._newcomer(event) is None:
            return
        self._late = event
        self._number += 1
        self.job.send_node(event.node_id, CollectEvidence(node_id=event.node_id, number=self._number))
        self.job.timer("late", GATHER_S)

    def _newcomer(self, event: Late) -> Member | None:
        member = self.job.roster.get(event.member_id)
        if member is None or not member.alive or not member.joining or member.kill_reason:
            return None
        return None if member.asked and not event.stopped else member

    def _judge_late(self, now: float, event: Late, found: Evidence) -> None:
        self._late = None
        self.job.cancel("late")
        member = self._newcomer(event)
        one = next((e for e in found.ranks if e.member_id == event.member_id), None)
        if member is None or one is None or one.idle_s < one.bound_s:
            return
        verdict = blame([one])
        if not verdict.by_process:
            if member.asked:
                return  # its process is no longer stopped
            reason = f"its start has made no progress for {one.idle_s:.1f} s, many times what others took"
            verdict = HangVerdict(answer="kill", ranks=(one.rank,), confidence="likely", reason=reason)
        self.job.record("hang", **_fields(verdict, [one]))
        self.job.kill(member, f"hangs: {verdict.reason}", hung_at_s=now - one.idle_s)

    def moved(self, now: float, event: ProgressResumed) -> None:
        """Handle the report that a worker moves again: the job does not hang, and collected evidence is dropped."""
        if self._stalled.pop(event.node_id, None) is None:
            return
        if self._evidence is not None or self._waits:
            self.job.record("moved", node=str(event.node_id))
        self._forget()

    def rejoined(self, node_id: NodeId) -> None:
        """Drop the stall that a replaced agent has reported: its successor may never report that the stall is over."""
        if self._stalled.pop(node_id, None) is not None:
            self._forget()

    def evidence(self, now: float, event: Evidence) -> None:
        """Handle the evidence that one agent has collected. When all agents have answered, judge the hang."""
        if event.number == LAST_LOOK:
            self._note_last(event)
            return
        if self._late is not None and event.number == self._number:
            self._judge_late(now, self._late, event)
            return
        if self._evidence is None or event.number != self._number:
            return
        self._evidence[event.node_id] = event
        if self.job.roster.nodes <= self._evidence.keys():
            self._judge(now)

    def _note_last(self, found: Evidence) -> None:
        """Log the evidence about a process that is killed because it did not answer."""
        for one in found.ranks:
            member = self.job.roster.get(one.member_id)
            if member is not None and member.alive and member.kill_reason:
                verdict = HangVerdict(
                    answer="kill", ranks=(member.rank,), confidence="certain", reason=member.kill_reason
                )
                self.job.record("hang", **_fields(verdict, [one]))

    def tick(self, now: float, name: str) -> bool:
        """Handle the timers of this class. Return False if ``name`` is another timer."""
        if name == "gather":
            if self._evidence is not None:
                self._judge(now)
        elif name == "patience":
            if self._stalled:
                self._gather()
        elif name == "late":
            self._late = None  # the report is repeated
        else:
            return False
        return True

    def _place(self, one: RankEvidence) -> str:
        """Return the position at which a rank hangs, as text.

        For a script without a session, the text includes the number of the rank's collective.
        """
        place = one.where or one.phase
        return place if self.job.session else f"{place}, collective {one.sequence}"

    def _is_between_nodes(self, ranks: Sequence[RankEvidence]) -> bool:
        """Return True if all ranks wait in the same collective, and their job has several nodes."""
        waits = {(c.group, c.number, c.what) for e in ranks for c in e.collectives if c.under_way}
        entered = all(any(c.under_way for c in e.collectives) for e in ranks)
        return len(waits) == 1 and entered and len(self.job.roster.nodes) > 1

    def _idle_s(self) -> float:
        return min((s.idle_s for s in self._stalled.values()), default=0.0)

    def _gather(self) -> None:
        self._number += 1
        self._evidence = {}
        for node_id in sorted(self.job.roster.nodes):
            self.job.send_node(node_id, CollectEvidence(node_id=node_id, number=self._number))
        self.job.timer("gather", GATHER_S)

    def _forget(self) -> None:
        self._stalled, self._evidence, self._waits = {}, None, 0
        for name in ("gather", "patience"):
            self.job.cancel(name)

    def _judge(self, now: float) -> None:
        found, self._evidence = self._evidence or {}, None
        self.job.cancel("gather")
        if not self.recovery.rules.trains:
            self._forget()
            return
        members = {m.rank: m for m in self.job.roster.living}
        told = sorted((e for event in found.values() for e in event.ranks), key=lambda e: e.rank)
        ranks = [e for e in told if e.rank in members and members[e.rank].member_id == e.member_id]
        verdict = blame(ranks)
        if (
            not verdict.by_process
            and not any(s.waiting for s in self._stalled.values())
            and not self.job.session
        ):
            self._forget()  # a stopped process runs again, and nothing else shows the state of the others
            return
        still_s = min((e.idle_s for e in ranks), default=0.0)
        if verdict.answer == "wait" and still_s >= self.job.config.patience_s:
            verdict = HangVerdict(answer="retry", reason=f"{verdict.reason}, for {still_s:.0f} s")
        self.job.record("hang", **_fields(verdict, ranks))
        if verdict.answer == "wait":
            self._waits += 1
            self.job.timer("patience", PATIENCE_S * 2 ** min(self._waits, 8))
            return
        since_s = now - still_s
        self._forget()
        if verdict.answer == "kill":
            for rank in verdict.ranks:
                member = members[rank]
                place = "" if verdict.by_process else self._place(next(e for e in ranks if e.rank == rank))
                self.job.kill(member, f"hangs: {verdict.reason}", hung_at_s=since_s, hung_in=place)
        else:
            first = min(ranks, key=lambda e: (e.step, PLACE.get(e.phase, 0), e.rank))
            fault = Fault.of(members[first.rank], "hang", f"hangs with all others: {verdict.reason}", now)
            fault.at_s, fault.step, fault.phase = since_s, first.step, first.phase
            # Neither while ranks return to a step nor where a network fails does code of the script hang: the next
            # attempt may succeed.
            if all(e.phase != "resuming" for e in ranks) and not self._is_between_nodes(ranks):
                fault.failure = Failure(
                    rank=first.rank,
                    step=first.step,
                    kind=HANG,
                    what=verdict.reason,
                    digest=f"hang of all in {', '.join(sorted({self._place(e) for e in ranks}))}"[:200],
                    occurrence=self.job.roster.generation.pack(),
                )
            self.recovery.fault(now, fault)


def _fields(verdict: HangVerdict, ranks: Sequence[RankEvidence]) -> dict[str, Field]:
    return {
        "answer": verdict.answer,
        "ranks": list(verdict.ranks),
        "confidence": verdict.confidence,
        "reason": verdict.reason,
        "evidence": [line(e) for e in ranks[:LINES_MAX]],
        "stacks": [e.stacks for e in ranks[:LINES_MAX] if e.stacks],
        "records": [e.records for e in ranks[:LINES_MAX] if e.records],
    }


def line(one: RankEvidence) -> str:
    """Return the evidence about one rank as one line of text."""
    bound = f" (bound {one.bound_s:.1f} s)" if one.bound_s else ""
    still = f"still for {one.idle_s:.1f} s{bound}"
    parts = [f"rank {one.rank}: {where(one)}", still, f"process {one.process or '?'}", f"cpu {one.cpu:.0%}"]
    if one.wchan not in ("", "0"):
        parts.append(f"kernel {one.wchan}")
    waits = next((c for c in one.collectives if c.under_way), None)
    if waits is not None:
        parts.append(f"in {waits.what} #{waits.number} of group {waits.group} for {waits.age_s:.1f} s")
    device = next((d for d in one.devices if d.given > d.ended), None)
    if device is not None:
        parts.append(f"device in #{device.ended + 1} of group {device.group} ({device.what})")
    parts.append(f"at {one.where}" if one.where else "no stack")
    return ", ".join(parts)
