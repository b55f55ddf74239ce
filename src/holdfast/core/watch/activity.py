"""What an agent tells of processes that a recovery may wait for: which of them move, and which are stopped.

Theory. In a recovery, and before its first step, a worker does things that take as long as its state is large: it
gives, takes, compares and writes bytes, which it counts on its page (``Word.WORK``). The controller kills only those
that do nothing (``core/job/wait_bounds.py``), so it is told of movement, not of amounts. Of workers that train it is
told nothing: ``core/watch/stall_detector.py`` judges them. A process that is stopped is told of wherever it is:
whether it matters depends on what it is waited for.

Invariants:
1. Movement is said at most once in ``SAY_S``, however much of it there is, and not at all when there is none.
2. A stopped process is told of when it has been stopped at each look for a while, and for as long as it is; that it
   runs again is told once.
3. Nothing here reads a clock: ``now`` is an argument, in seconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import NamedTuple

from holdfast.core.ids import MemberId, NodeId
from holdfast.core.protocol.health_messages import Active

SAY_S = 1.0
LOOK_S = 0.5


class WorkerSeen(NamedTuple):
    """One look at one living worker."""

    member_id: MemberId
    mark: tuple[int, ...]  # differs from the last one when the worker has moved
    recovers: bool  # it was fenced and does not train yet, or has not done a step
    stopped: bool  # its process is


class Activity:
    """The workers of one node. ``look`` at them regularly.

    Args:
        stopped_s: for so long a process is stopped until that is told: a debugger that looks stops it for a moment.
    """

    def __init__(self, node_id: NodeId, stopped_s: float) -> None:
        self._node_id = node_id
        self._stopped_s = stopped_s
        self._marks: dict[MemberId, tuple[int, ...]] = {}
        self._stopped: dict[MemberId, float] = {}  # since when
        self._moving: set[MemberId] = set()  # since it was said last
        self._told: tuple[MemberId, ...] = ()  # as stopped
        self._said_s = self._looked_s = -inf

    def is_due(self, now: float) -> bool:
        """It is time for the next look."""
        return now - self._looked_s >= LOOK_S

    def look(self, now: float, seen: Sequence[WorkerSeen]) -> Active | None:
        """Take one look at all living workers; returns what is to be told."""
        self._looked_s = now
        known, self._marks = self._marks, {one.member_id: one.mark for one in seen}
        self._moving |= {o.member_id for o in seen if o.recovers and known.get(o.member_id, o.mark) != o.mark}
        since = self._stopped
        self._stopped = {o.member_id: since.get(o.member_id, now) for o in seen if o.stopped}
        stopped = tuple(sorted(m for m, at_s in self._stopped.items() if now - at_s >= self._stopped_s))
        due = now - self._said_s >= SAY_S and (self._moving or stopped)
        if not due and stopped == self._told:
            return None
        active = Active(self._node_id, tuple(sorted(self._moving)), stopped)
        self._moving, self._told, self._said_s = set(), stopped, now
        return active
