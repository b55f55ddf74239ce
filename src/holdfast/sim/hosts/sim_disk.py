"""The disk of a simulated host: its event log and the file of its promises in elections.

Theory. A written line of the log is in the page cache. A synced line is on the disk. The death of a process loses
neither. A loss of power loses lines that were not synced. The last remaining line may be torn, and a reader of the log
skips a torn line. The file of promises is replaced with fsync, so after a loss of power the file is the old one or the
new one.
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
    """The disk has no room for a file."""


class LogLine(NamedTuple):
    """One line of an event log: the record of a controller.

    Attributes:
        term: the term of the controller; 0 if it decides alone, because its lines are for this host only.
        number: the number of the line in its term; 0 if the controller decides alone.
        record: the record.
        at_s: time on the clock of this host when the line was written here.
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
    """The disk of one host. See the module."""

    def __init__(self) -> None:
        self.ballot = HardState()
        self.lines: list[LogLine] = []
        self.is_full = False
        self.slow_s = 0.0  # the largest extra time of a sync
        self._places: set[LinePlace] = set()
        self._synced = 0

    @property
    def last_place(self) -> LinePlace:
        """The place of the newest line; ``NO_PLACE`` if there is none."""
        return max(self._places, default=NO_PLACE)

    def next_number(self, term: int) -> int:
        """Return the number of the next line that the controller of ``term`` writes on this host."""
        return 1 + sum(place[0] == term for place in self._places)

    def append(self, line: LogLine) -> None:
        """Write one line. This works on a full disk, too, because a daemon reserves room at the end of its log.

        Raises:
            Violation: the log has this line already.
        """
        if line.term and line.place in self._places:
            raise Violation("a_line_is_logged_once", f"line {line.term}.{line.number} {line.record.kind}")
        self._places.add(line.place)
        self.lines.append(line)

    def sync(self) -> None:
        """Put all lines written so far on the disk, so that they survive a loss of power."""
        self._synced = len(self.lines)

    def sync_s(self, jitter: Callable[[float, float], float]) -> float:
        """Draw the duration of one sync, in seconds."""
        return jitter(*SYNC_S) + (jitter(0.0, self.slow_s) if self.slow_s else 0.0)

    def keep(self, ballot: HardState) -> None:
        """Replace the file of promises, with fsync.

        Raises:
            DiskFullError: there is no room. The old file is unchanged.
        """
        if self.is_full:
            raise DiskFullError("promises")
        self.ballot = ballot

    def lose_power(self, rng: random.Random) -> None:
        """Drop some of the lines that were not synced: all lines from a random one of them on."""
        kept = rng.randint(self._synced, len(self.lines))
        del self.lines[kept:]
        self._places = {line.place for line in self.lines}
        self._synced = len(self.lines)

    def in_force(self, *, alone: bool = False) -> list[LogLine]:
        """Return the lines that count for a leader, or for a controller that is alone."""
        lines = ((line.place, line.record.data, line) for line in self.lines)
        return in_force(lines, without_place=alone)

    def read(self, now_s: float, *, alone: bool) -> ReplayedState:
        """Replay the log and return the state from which a controller on this host starts.

        Times in the state are on the clock of this host.
        """
        past = ReplayedState()
        for line in self.in_force(alone=alone):
            past = past.after(line.record, min(line.at_s, now_s))
        return past
