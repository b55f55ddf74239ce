"""Detection of stragglers: ranks whose own part of a step takes much longer than that of other ranks.

Theory. Each node sends the median step times of its ranks every few seconds. In a large job such a message arrives
every few milliseconds. All medians are therefore kept sorted: the usual time is in the middle, and the slow ranks are
at the end. The cost of a message depends on its size, not on the size of the job.

Invariants:
1. Each rank counts once, with the newest median that a node with living workers has sent.
2. The cost of a judgement is proportional to the number of slow ranks. After a judgement that found n slow ranks, the
   next one waits for n new medians.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Mapping, Sequence
from math import isnan

from holdfast.core.ids import NodeId
from holdfast.core.job.job_state import Job
from holdfast.core.job.membership import Member
from holdfast.core.job.recovery import Recovery
from holdfast.core.protocol.health_messages import StepTime, StepTimes

SLOW_RATIO = 1.5
SLOW_ENDS_RATIO = 1.25
SLOW_S_MIN = 0.005
PACE_SAMPLES_MIN = 16


class Paces:
    """The median step times of all ranks, sorted by time."""

    def __init__(self) -> None:
        self._ordered: list[tuple[float, int]] = []  # seconds and rank
        self._known: dict[int, tuple[float, NodeId]] = {}
        self._told: dict[NodeId, Sequence[int]] = {}

    @property
    def nodes(self) -> tuple[NodeId, ...]:
        """The nodes that have sent median step times."""
        return tuple(self._told)

    def tell(self, node_id: NodeId, paces: Sequence[StepTime]) -> None:
        """Replace the median step times of one node by those in ``paces``, the newest message of the node."""
        self.forget(node_id)
        known = [p for p in paces if p.samples >= PACE_SAMPLES_MIN and not isnan(p.busy_s)]
        for pace in known:
            self._remove(pace.rank)
            self._known[pace.rank] = (pace.busy_s, node_id)
            insort(self._ordered, (pace.busy_s, pace.rank))
        self._told[node_id] = [p.rank for p in known]

    def forget(self, node_id: NodeId) -> None:
        """Drop the medians of a node, except for ranks that another node has reported since then."""
        for rank in self._told.pop(node_id, ()):
            if rank in self._known and self._known[rank][1] == node_id:
                self._remove(rank)

    def slow(self, before: set[int]) -> dict[int, tuple[float, float]]:
        """Return the ranks whose steps take much longer than those of the others. Waits for peers are left out.

        Args:
            before: the ranks that were slow until now. The limit to become slow is higher than the limit to stay slow.

        Returns:
            For each slow rank: its median step time and the median of the other ranks, in seconds.
        """
        found: dict[int, tuple[float, float]] = {}
        for place in range(len(self._ordered) - 1, 0, -1):
            busy_s, rank = self._ordered[place]
            usual_s = self._usual_s(place)
            if usual_s <= 0 or busy_s <= SLOW_ENDS_RATIO * usual_s or busy_s - usual_s <= SLOW_S_MIN:
                break  # the ranks before it are faster
            if rank in before or busy_s > SLOW_RATIO * usual_s:
                found[rank] = (busy_s, usual_s)
        return found

    def _usual_s(self, left_out: int) -> float:
        """Return the median, in seconds, of all entries except the one at index ``left_out``."""
        others = len(self._ordered) - 1
        low, high = (
            self._ordered[place + (place >= left_out)][0] for place in ((others - 1) // 2, others // 2)
        )
        return (low + high) / 2

    def _remove(self, rank: int) -> None:
        known = self._known.pop(rank, None)
        if known is not None:
            del self._ordered[bisect_left(self._ordered, (known[0], rank))]


class Stragglers:
    """The part of the controller that reports slow ranks.

    It shares the facts of the run (``job``) with the controller.
    """

    def __init__(self, job: Job, recovery: Recovery) -> None:
        self.job = job
        self.recovery = recovery
        self._paces = Paces()
        self._slow: set[int] = set()
        self._unjudged = 0  # medians received since the last judgement
        # The list of living members for which nodes without workers were last dropped.
        self._living: list[Member] | None = None

    def paced(self, event: StepTimes) -> None:
        """Handle the step times of one node.

        Record the ranks that have become slow, and those that are no longer slow.
        """
        roster = self.job.roster
        if event.generation != roster.generation:
            return
        self._paces.tell(event.node_id, event.ranks)
        self.job.step_s[event.node_id] = event.step_s
        if self._living is not roster.living:
            self._living = roster.living
            for node_id in self._paces.nodes:
                if node_id not in roster.nodes:
                    self._paces.forget(node_id)
        self._unjudged += len(event.ranks)
        if self._unjudged >= len(self._slow):
            self._unjudged = 0
            self._judge()

    def _judge(self) -> None:
        slow = self._paces.slow(self._slow)
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
        for rank, (busy_s, others_s) in sorted(slow.items()):
            member = self.job.roster.at(rank)
            if member is not None and member.alive and busy_s / others_s >= limit:
                self._slow.discard(rank)
                self._paces = Paces()
                ratio = f"{busy_s / others_s:.1f} times as long as the others"
                self.job.kill(member, f"is a straggler: its steps take {ratio}")
                return
