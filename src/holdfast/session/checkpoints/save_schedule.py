"""The schedule of saves: each rank asks its policies at every step, a vote decides, and a busy disk delays the save.

Theory. Clocks and measurements differ between ranks, so no rank acts on its own policy. Each rank sets ``due`` in its
ballot if a policy wants a save, and all ranks read the same tally. A save that begins while the previous one is being
written would make the step wait for the disk. So a rank that is still writing sets ``busy``, and then no rank saves. No
request is stored: a policy returns True at each step until the save is made.

Invariants:
1. :meth:`SaveSchedule.agreed` returns the same value on all ranks.
2. A slow disk makes saves less frequent and causes a warning. It never makes a step longer.
"""

from __future__ import annotations

import logging
import statistics
import time
from collections import deque
from collections.abc import Sequence

from holdfast.core.worker.vote import Tally
from holdfast.store.manage.retention import Moment, SavePolicy

log = logging.getLogger("holdfast")

MEASURED_MAX = 5


class SaveSchedule:
    """The schedule of saves of one session.

    Args:
        policies: the save policies. A save is due when any policy returns True.
        faults: number of faults of this run before this session was opened.
        run_s: age of the run in seconds when this session was opened.

    Attributes:
        asked: the script has called ``Session.save`` since the last save.
    """

    def __init__(self, policies: Sequence[SavePolicy], *, faults: int = 0, run_s: float = 0.0) -> None:
        self.asked = False
        self._policies = tuple(policies)
        self._faults = faults
        self._began_s = time.monotonic() - run_s
        self._last_step = 0
        self._last_s = time.monotonic()
        self._stalls_s: deque[float] = deque(maxlen=MEASURED_MAX)
        self._durable_s = 0.0
        self._delayed_steps = 0
        self._said = False

    def start(self, step: int) -> None:
        """Begin to count steps and time since the last save: the state of ``step`` is saved, loaded or new."""
        self._last_step, self._last_s = step, time.monotonic()

    def measured(self, *, stall_s: float = 0.0, durable_s: float = 0.0) -> None:
        """Record the cost of a save.

        Args:
            stall_s: seconds by which the save delayed training; 0 if not measured.
            durable_s: seconds until the save was on disk; 0 if not measured.
        """
        if stall_s:
            self._stalls_s.append(stall_s)
        self._durable_s = durable_s or self._durable_s

    def due(self, step: int) -> bool:
        """Return whether a policy wants a save of the state after ``step`` updates."""
        if not self._policies:
            return False
        now_s = time.monotonic()
        now = Moment(
            step=step,
            since_steps=step - self._last_step,
            since_s=now_s - self._last_s,
            stall_s=statistics.median(self._stalls_s) if self._stalls_s else 0.0,
            durable_s=self._durable_s,
            faults=self._faults,
            run_s=now_s - self._began_s,
        )
        return any(policy(now) for policy in self._policies)

    def agreed(self, tally: Tally, step: int) -> str:
        """Return the kind of the save that all ranks make now at ``step``: ``request`` or ``periodic``.

        The result is empty if no save is due.
        """
        if not (tally.save or tally.due):
            return ""
        if tally.busy:
            self._delayed_steps += 1
            if not self._said:
                self._said = True
                log.warning(
                    "holdfast: the save due at step %d waits until the save of step %d is written: training continues, "
                    "and saves come as often as the disk allows",
                    step,
                    self._last_step,
                )
            return ""
        self.asked = False
        self.start(step)
        return "request" if tally.save else "periodic"

    def take_delay(self) -> int:
        """Return the number of steps by which the present save was delayed, and reset this number."""
        delayed, self._delayed_steps = self._delayed_steps, 0
        return delayed
