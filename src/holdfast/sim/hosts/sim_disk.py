"""The disk of a simulated host: its event log, and the file with its election state (term, vote, electorate).

Theory. A written line of the log is in the page cache. A synced line is on the disk. The death of a process loses no
lines. A loss of power may lose lines that were not synced. The last remaining line may be incomplete, and a reader of
the log skips an incomplete line. The election file is replaced with fsync, so a loss of power leaves either the old
file or the new file.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import NamedTuple

from holdfast.core.election import HardState
from holdfast.core.job.log_replay import NO_PLACE, LinePlace, ReplayedState, in_force
from holdfast.core.protocol.messages import LogRecord
from holdfast.sim.invariants import Violation

SYNC_S = (0.0002, 0.004)


class DiskFullError(OSError):
    """The error of a write to a disk that has no room for the file."""


class LogLine(NamedTuple):
    """One line of an event log: the record of a controller.

    Attributes:
        term: the term of the controller; 0 if the controller decides alone, because then the line is for this host
            only.
        number: the number of the line in its term; 0 if the controller decides alone.
        record: the record of the controller.
        at_s: time at which the line was written on this host, in seconds on the host's clock.
    """

    term: int
    number: int
    record: LogRecord
    at_s: float

    @property
    def place(self) -> LinePlace:
        """Position of the line in the order of all lines of all controllers: (term, number)."""
        return self.term, self.number


class SimDisk:
    """The disk of one host.

    Attributes:
        ballot: the contents of the election file.
        lines: the lines of the event log.
        is_full: True if no file can be written. The event log can still grow, because room is reserved for it.
    """

    def __init__(self) -> None:
        self.ballot = HardState()
        self.lines: list[LogLine] = []
        self.is_full = False
        self.slow_s = 0.0  # the largest extra time of a sync
        self._places: set[LinePlace] = set()
        self._synced = 0

    @property
    def last_place(self) -> LinePlace:
        """(term, number) of the newest line of the event log; ``NO_PLACE`` if the log is empty."""
        return max(self._places, default=NO_PLACE)

    def next_number(self, term: int) -> int:
        """Return the number of the next event log line that the controller of ``term`` writes on this host."""
        return 1 + sum(place[0] == term for place in self._places)

    def append(self, line: LogLine) -> None:
        """Write one line to the event log.

        This succeeds even on a full disk, because the process that writes a log reserves room at its end.

        Raises:
            Violation: the log has a line with this term and number already.
        """
        if line.term and line.place in self._places:
            raise Violation("a_line_is_logged_once", f"line {line.term}.{line.number} {line.record.kind}")
        self._places.add(line.place)
        self.lines.append(line)

    def sync(self) -> None:
        """Sync the event log: all lines written so far then survive a loss of power."""
        self._synced = len(self.lines)

    def sync_s(self, jitter: Callable[[float, float], float]) -> float:
        """Return a random duration of one sync, in virtual seconds. ``jitter`` draws a number between two bounds."""
        return jitter(*SYNC_S) + (jitter(0.0, self.slow_s) if self.slow_s else 0.0)

    def keep(self, ballot: HardState) -> None:
        """Replace the election file, with fsync.

        Raises:
            DiskFullError: the disk is full. The old file is unchanged.
        """
        if self.is_full:
            raise DiskFullError("promises")
        self.ballot = ballot

    def lose_power(self, rng: random.Random) -> None:
        """Drop a random number of lines from the end of the event log, but no synced line."""
        kept = rng.randint(self._synced, len(self.lines))
        del self.lines[kept:]
        self._places = {line.place for line in self.lines}
        self._synced = len(self.lines)

    def in_force(self, *, alone: bool = False) -> list[LogLine]:
        """Return the lines of the event log from which a controller on this host continues.

        Args:
            alone: True for a controller that decides alone. Its own lines (term 0) are then included.
        """
        lines = ((line.place, line.record.data, line) for line in self.lines)
        return in_force(lines, without_place=alone)

    def read(self, now_s: float, *, alone: bool) -> ReplayedState:
        """Replay the event log and return the state of the job with which a controller on this host starts.

        Args:
            now_s: the reading of this host's clock. Times in the result are on this clock, and none is after ``now_s``.
            alone: True for a controller that decides alone.
        """
        past = ReplayedState()
        for line in self.in_force(alone=alone):
            past = past.after(line.record, min(line.at_s, now_s))
        return past
