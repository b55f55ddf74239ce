"""A job that stands still: evidence first, then a name, then the fault.

Theory. Agents say when all workers of their node are stalled, and when one moves again. Only when every node with a
living worker says so does the job stand still: then evidence is gathered from all, the culprit is named by a pure
function, and what follows is an ordinary fault. Killing comes last: a worker that moves while the evidence is gathered
takes everything back. Slow ranks are another matter (``core/watch/stragglers.py``).

While newcomers start, the others wait for the control plane: each newcomer is judged alone until it asks for its state;
from then on it may be waiting for others, and only a stopped process is evidence.

Whoever has not answered within a time of the recovery is killed by that (``Job.time_out``); its agent takes a last
look at it first, which is written down here as for every other hang.

Invariants:
1. Nobody is killed for standing still unless evidence that names him is in the log before. Who is killed for his
   silence is looked at before, and the evidence comes ahead of his death.
2. During a recovery nobody but a newcomer is judged here: its own timers bound everybody.
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
GATHER_S = 3.0  # an agent answers within this, or is left out
PATIENCE_S = 2.0  # until the next look when nobody is to blame; doubles


class Hangs:
    """Sub-machine of the controller. ``job`` is shared with it."""

    def __init__(self, job: Job, recovery: Recovery) -> None:
        self.job = job
        self.recovery = recovery
        self._stalled: dict[NodeId, Stalled] = {}
        self._evidence: dict[NodeId, Evidence] | None = None
        self._number = 0
        self._waits = 0
        self._late: Late | None = None  # evidence about it is awaited

    def stalled(self, now: float, event: Stalled) -> None:
        """All workers of one node stand still."""
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
        """Without a session only a collective, or a stopped process, tells a script that works from one that hangs."""
        return self.job.session or event.waiting or event.stopped

    def late(self, event: Late) -> None:
        """A process that has not done a step yet is too slow, if it is a newcomer."""
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
                return  # it runs again
            reason = f"its start has made no progress for {one.idle_s:.1f} s, many times what others took"
            verdict = HangVerdict(answer="kill", ranks=(one.rank,), confidence="likely", reason=reason)
        self.job.record("hang", **_fields(verdict, [one]))
        self.job.kill(member, f"hangs: {verdict.reason}", hung_at_s=now - one.idle_s)

    def moved(self, now: float, event: ProgressResumed) -> None:
        """One of them moves: nobody hangs."""
        if self._stalled.pop(event.node_id, None) is None:
            return
        if self._evidence is not None or self._waits:
            self.job.record("moved", node=str(event.node_id))
        self._forget()

    def rejoined(self, node_id: NodeId) -> None:
        """What an agent said does not count for its successor, which may never say that it is over."""
        if self._stalled.pop(node_id, None) is not None:
            self._forget()

    def evidence(self, now: float, event: Evidence) -> None:
        """What one agent found."""
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
        """Where somebody stood who is killed for his silence."""
        for one in found.ranks:
            member = self.job.roster.get(one.member_id)
            if member is not None and member.alive and member.kill_reason:
                verdict = HangVerdict(
                    answer="kill", ranks=(member.rank,), confidence="certain", reason=member.kill_reason
                )
                self.job.record("hang", **_fields(verdict, [one]))

    def tick(self, now: float, name: str) -> bool:
        """One of this machine's timers; False when the name is not one of them."""
        if name == "gather":
            if self._evidence is not None:
                self._judge(now)
        elif name == "patience":
            if self._stalled:
                self._gather()
        elif name == "late":
            self._late = None  # it is said again
        else:
            return False
        return True

    def _place(self, one: RankEvidence) -> str:
        """Where a rank hangs; without a session the number of its collective says what a step would."""
        place = one.where or one.phase
        return place if self.job.session else f"{place}, collective {one.sequence}"

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
            self._forget()  # one that was stopped runs again, and nothing else tells where the others are
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
            if all(
                e.phase != "resuming" for e in ranks
            ):  # else no code of the script: the next rung may do better
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
    """One rank's evidence in one line."""
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
