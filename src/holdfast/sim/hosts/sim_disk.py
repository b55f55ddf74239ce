"""The disk of a simulated host: its event log, as far as controllers wrote it, and its promises in elections.

Theory. A line is in the page cache when it was written and on the disk when it was synced. A killed process loses
neither; a host that loses power loses the lines that were not synced, and the last of those that are left may be torn:
a reader of the log leaves it out. The file of promises is replaced with fsync: it is whole, the old one or the new one.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import NamedTuple

from holdfast.core.election import HardState
from holdfast.core.job.log_replay import ReplayedState
from holdfast.core.protocol.messages import LogRecord
from holdfast.sim.invariants import Violation

SYNC_S = (0.0002, 0.004)


class DiskFullError(OSError):
    """There is no room for a file."""


class LogLine(NamedTuple):
    """One line of a controller.

    ``at_s``: on the clock of this host, when it was written here. Term and number are 0 for a controller that is alone:
    its lines are for this host only.
    """

    term: int
    number: int
    record: LogRecord
    at_s: float

    @property
    def place(self) -> tuple[int, int]:
        """Its place among all lines of all controllers."""
        return self.term, self.number


class SimDisk:
    """See the module."""

    def __init__(self) -> None:
        self.ballot = HardState()
        self.lines: list[LogLine] = []
        self.is_full = False
        self.slow_s = 0.0  # what a sync takes at most, beyond the usual
        self._places: set[tuple[int, int]] = set()
        self._synced = 0

    @property
    def last_place(self) -> tuple[int, int]:
        """Of the newest line; (0, 0): none."""
        return max(self._places, default=(0, 0))

    def next_number(self, term: int) -> int:
        """Of the next line of the controller of ``term``, which runs here."""
        return 1 + sum(place[0] == term for place in self._places)

    def append(self, line: LogLine) -> None:
        """Write one line.

        A full disk has room for it: a daemon keeps room at the end of its log.

        Raises:
            Violation: the log has this line already.
        """
        if line.term and line.place in self._places:
            raise Violation("a_line_is_logged_once", f"line {line.term}.{line.number} {line.record.kind}")
        self._places.add(line.place)
        self.lines.append(line)

    def sync(self) -> None:
        """Every line so far survives a loss of power."""
        self._synced = len(self.lines)

    def sync_s(self, jitter: Callable[[float, float], float]) -> float:
        """What one sync takes."""
        return jitter(*SYNC_S) + (jitter(0.0, self.slow_s) if self.slow_s else 0.0)

    def keep(self, ballot: HardState) -> None:
        """Replace the file of promises, with fsync.

        Raises:
            DiskFullError: there is no room; the old one is unchanged.
        """
        if self.is_full:
            raise DiskFullError("promises")
        self.ballot = ballot

    def lose_power(self, rng: random.Random) -> None:
        """Lines that were not synced are gone, from one of them on."""
        kept = rng.randint(self._synced, len(self.lines))
        del self.lines[kept:]
        self._places = {line.place for line in self.lines}
        self._synced = len(self.lines)

    def read(self, now_s: float) -> ReplayedState:
        """What a controller that starts here knows of the past; times are those of this host's clock."""
        past = ReplayedState()
        for line in self.lines:
            past = past.after(line.record, min(line.at_s, now_s))
        return past
