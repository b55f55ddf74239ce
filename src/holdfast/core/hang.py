"""A job that stands still: evidence first, then a name, then the fault.

Theory. Agents say when all workers of their node are stalled, and when one moves again. Only when every node with a
living worker says so does the job stand still: then evidence is gathered from all, the culprit is named by a pure
function, and what follows is an ordinary fault. Killing comes last: a worker that moves while the evidence is gathered
takes everything back. Slow ranks are another matter: they are measured, told, and replaced only when asked to.

While newcomers start, the others wait for the control plane: each newcomer is judged alone until it asks for its state;
from then on it may be waiting for others, and only a stopped process is evidence.

Invariants:
1. Nobody is killed for standing still unless evidence that names him is in the log before.
2. During a recovery nobody but a newcomer is judged here: its own timers bound everybody.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median

from holdfast.core.culprit import PLACE, Blame, blame, where
from holdfast.core.fault import Fault
from holdfast.core.ids import NodeId
from holdfast.core.job import Job
from holdfast.core.membership import Member
from holdfast.core.messages import Field
from holdfast.core.recovery import Recovery
from holdfast.core.sightings import Evidence, Gather, Late, Moved, Pace, Paced, RankEvidence, Stalled

LINES_MAX = 64
GATHER_S = 3.0  # an agent answers within this, or is left out
PATIENCE_S = 2.0  # until the next look when nobody is to blame; doubles
SLOW_RATIO = 1.5
SLOW_ENDS_RATIO = 1.25
SLOW_S_MIN = 0.005
PACE_SAMPLES_MIN = 16
QUIET = ("idle", "starting", "resuming")
"""Phases of a recovery in which workers train, or are about to."""


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
        self._paces: dict[NodeId, Paced] = {}
        self._slow: set[int] = set()

    def stalled(self, now: float, event: Stalled) -> None:
        """All workers of one node stand still."""
        if event.generation != self.job.roster.generation or self.recovery.phase not in QUIET:
            return
        if not self._is_evident(event):
            return
        self._stalled[event.node_id] = event
        nodes = {m.node_id for m in self.job.roster.living}
        if self._evidence is not None or self._waits or not nodes or not nodes <= set(self._stalled):
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
        self.job.send_node(event.node_id, Gather(node_id=event.node_id, number=self._number))
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
            verdict = Blame(answer="kill", ranks=(one.rank,), confidence="likely", reason=reason)
        self.job.record("hang", **_fields(verdict, [one]))
        member.hung_at_s = now - one.idle_s
        self.job.kill(member, f"hangs: {verdict.reason}")

    def moved(self, now: float, event: Moved) -> None:
        """One of them moves: nobody hangs."""
        if self._stalled.pop(event.node_id, None) is None:
            return
        if self._evidence is not None or self._waits:
            self.job.record("moved", node=str(event.node_id))
        self._forget()

    def evidence(self, now: float, event: Evidence) -> None:
        """What one agent found."""
        if self._late is not None and event.number == self._number:
            self._judge_late(now, self._late, event)
            return
        if self._evidence is None or event.number != self._number:
            return
        self._evidence[event.node_id] = event
        if {m.node_id for m in self.job.roster.living} <= set(self._evidence):
            self._judge(now)

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

    def _idle_s(self) -> float:
        return min((s.idle_s for s in self._stalled.values()), default=0.0)

    def _gather(self) -> None:
        self._number += 1
        self._evidence = {}
        for node_id in sorted({m.node_id for m in self.job.roster.living}):
            self.job.send_node(node_id, Gather(node_id=node_id, number=self._number))
        self.job.timer("gather", GATHER_S)

    def _forget(self) -> None:
        self._stalled, self._evidence, self._waits = {}, None, 0
        for name in ("gather", "patience"):
            self.job.cancel(name)

    def _judge(self, now: float) -> None:
        found, self._evidence = self._evidence or {}, None
        self.job.cancel("gather")
        if self.recovery.phase not in QUIET:
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
            verdict = Blame(answer="retry", reason=f"{verdict.reason}, for {still_s:.0f} s")
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
                member.hung_at_s = since_s
                if not verdict.by_process and self.job.session:
                    member.hung_in = next(e.where or e.phase for e in ranks if e.rank == rank)
                self.job.kill(member, f"hangs: {verdict.reason}")
        else:
            first = min(ranks, key=lambda e: (e.step, PLACE.get(e.phase, 0), e.rank))
            fault = Fault.of(members[first.rank], "hang", f"hangs with all others: {verdict.reason}", now)
            fault.at_s, fault.step, fault.phase = since_s, first.step, first.phase
            self.recovery.fault(now, fault)

    # ---------------------------------------------------------------- stragglers

    def paced(self, now: float, event: Paced) -> None:
        """How fast the workers of one node are: name who holds up the others, and when that is over."""
        if event.generation != self.job.roster.generation:
            return
        self._paces[event.node_id] = event
        nodes = {m.node_id for m in self.job.roster.living}
        paces = [p for node_id in sorted(nodes) if node_id in self._paces for p in self._paces[node_id].ranks]
        slow = stragglers(paces, self._slow)
        for rank in sorted(slow.keys() - self._slow):
            busy_s, others_s = slow[rank]
            self.job.record(
                "straggler",
                rank=rank,
                busy_s=round(busy_s, 6),
                others_s=round(others_s, 6),
                ratio=round(busy_s / others_s, 2),
            )
        for rank in sorted(self._slow - slow.keys()):
            self.job.record("straggler_gone", rank=rank)
        self._slow = set(slow)
        self._replace(slow)

    def _replace(self, slow: Mapping[int, tuple[float, float]]) -> None:
        limit = self.job.config.replace_slower_than
        if not limit or self.recovery.phase != "idle":
            return
        for member in self.job.roster.living:
            busy_s, others_s = slow.get(member.rank, (0.0, 1.0))
            if busy_s / others_s >= limit:
                self._slow.discard(member.rank)
                self._paces.clear()
                ratio = f"{busy_s / others_s:.1f} times as long as the others"
                self.job.kill(member, f"is a straggler: its steps take {ratio}")
                return


def stragglers(paces: Sequence[Pace], before: set[int]) -> dict[int, tuple[float, float]]:
    """Ranks whose steps take much longer than the others', waiting left out.

    Args:
        paces: of all ranks of the job.
        before: who was one until now; it takes more to become one than to stay one.

    Returns:
        For each: its median and the median of the others, in seconds.
    """
    known = [p for p in paces if p.samples >= PACE_SAMPLES_MIN]
    found: dict[int, tuple[float, float]] = {}
    for one in known:
        others = [p.busy_s for p in known if p.rank != one.rank]
        if not others:
            continue
        usual_s = median(others)
        ratio = SLOW_ENDS_RATIO if one.rank in before else SLOW_RATIO
        if usual_s > 0 and one.busy_s > ratio * usual_s and one.busy_s - usual_s > SLOW_S_MIN:
            found[one.rank] = (one.busy_s, usual_s)
    return found


def _fields(verdict: Blame, ranks: Sequence[RankEvidence]) -> dict[str, Field]:
    return {
        "answer": verdict.answer,
        "ranks": list(verdict.ranks),
        "confidence": verdict.confidence,
        "reason": verdict.reason,
        "evidence": [line(e) for e in ranks[:LINES_MAX]],
        "stacks": [e.stacks for e in ranks[:LINES_MAX] if e.stacks],
    }


def line(one: RankEvidence) -> str:
    """One rank's evidence in one line."""
    still = f"still for {one.idle_s:.1f} s (bound {one.bound_s:.1f} s)"
    parts = [f"rank {one.rank}: {where(one)}", still, f"process {one.process or '?'}", f"cpu {one.cpu:.0%}"]
    if one.wchan not in ("", "0"):
        parts.append(f"kernel {one.wchan}")
    waits = next((c for c in one.collectives if c.under_way), None)
    if waits is not None:
        parts.append(f"in {waits.what} #{waits.number} of group {waits.group} for {waits.age_s:.1f} s")
    parts.append(f"at {one.where}" if one.where else "no stack")
    return ", ".join(parts)
