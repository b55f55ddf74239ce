"""The report of an agent on the processes that a recovery may wait for: processes with progress, and stopped ones.

Theory. In a recovery, and before its first step, a worker does work that grows with its state: it gives, receives,
compares and writes bytes, and counts them on its status page (``Word.WORK``). The controller kills only workers without
progress (``core/job/wait_bounds.py``), so the agent reports that there is progress, not how much. It reports no
progress of workers that train: ``core/watch/stall_detector.py`` judges them. It reports stopped processes in every
phase, because only the controller knows whether it waits for them.

Invariants:
1. Progress is reported at most once in ``SAY_S`` seconds. Without progress, no report is sent.
2. A process is reported as stopped when all looks during ``stopped_s`` have found it stopped, and again while it stays
   stopped. The end of the stop is reported once.
3. This module reads no clock: ``now`` is an argument, in seconds.
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
    """The result of one look at one living worker."""

    member_id: MemberId
    mark: tuple[int, ...]  # differs from the mark of the last look if the worker has made progress
    recovers: bool  # the worker was fenced and does not train yet, or has not done a step
    stopped: bool  # its process is stopped


class Activity:
    """The progress of the workers of one node. The agent calls ``look`` regularly.

    Args:
        node_id: the node.
        stopped_s: seconds for which a process must be stopped before it is reported; a debugger's stop is shorter.
    """

    def __init__(self, node_id: NodeId, stopped_s: float) -> None:
        self._node_id = node_id
        self._stopped_s = stopped_s
        self._marks: dict[MemberId, tuple[int, ...]] = {}
        self._stopped: dict[MemberId, float] = {}  # start of the stop, in seconds
        self._moving: set[MemberId] = set()  # since the last report
        self._told: tuple[MemberId, ...] = ()  # last reported as stopped
        self._said_s = self._looked_s = -inf

    def is_due(self, now: float) -> bool:
        """Return True if it is time for the next look."""
        return now - self._looked_s >= LOOK_S

    def look(self, now: float, seen: Sequence[WorkerSeen]) -> Active | None:
        """Record one look at all living workers. Return the report to send, or None."""
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
