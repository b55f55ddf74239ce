"""Who has stopped moving: how long a worker may show no progress, learned from how long it usually takes.

Theory. A worker *moves* when its status page changes: a phase, a collective, a step. All ranks of a job meet in
the vote of each step, so when one of them stands still for good, soon all of them do. That is what is looked for:
a node is *stalled* when every worker of it has been without progress for longer than its own bound. A rank that
waits for a slow one is past its bound early and does no harm; the slow one's bound is what counts. Who is to
blame is another question (``core/watch/hang_attribution.py``), asked only then.

Bounds come from robust statistics: a factor times the median of the recent steps, never below a floor, nor below
a multiple of what the same phase has survived before. Before there are samples they are generous, and so is what
is not a step: sections are announced by name and learned by name. A script without a session shows nothing but its
collectives: one that is under way has a bound learned from the time between them, other code a generous one.

A process that starts beside others that train (a newcomer, a spare) is judged alone: it is *late* when it has been
still for many times what the start of others took, or when it is stopped.

Invariants:
1. A stall is announced once, and taken back once when any worker moves.
2. Time during which nobody looked does not count against a worker: a frozen or starved machine kills nobody.
3. Nothing here reads a clock: ``now`` is an argument, in seconds.
4. What was learned outlives who learned it: a successor that is given it judges as its predecessor would have. Without
   it, the pages say what the last step took: nobody gets the time of a first step for a later one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from math import inf
from statistics import median
from typing import NamedTuple

import msgspec

from holdfast.core.ids import MemberId
from holdfast.core.job.spares import is_spare
from holdfast.core.protocol.status_page import Phase

WAITING = frozenset({Phase.ABORTED, Phase.IN_DOUBT, Phase.TORN, Phase.FINISHED, Phase.LEFT, Phase.SPARE})
"""Phases in which a worker waits for the control plane or is done: it holds nobody up."""
IN_STEP = frozenset({Phase.FORWARD, Phase.BACKWARD, Phase.VOTE, Phase.UPDATE, Phase.COMMIT})
SAMPLES_MAX = 64
SAMPLES_MIN = 3  # committed steps of a process before its bound is learned
DUE_FLOORS = (
    80  # times the floor until all have rebuilt their connections: thousands of ranks may have to meet
)
APART_MIN = 20  # moves of a script without a session before its bound is learned
PEAK_STEPS = 64  # what was survived once is half forgotten after so many steps


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """What bounds are made of; seconds unless the name says otherwise."""

    factor: float = 10.0  # median steps without progress; 0: hangs are not looked for
    floor_s: float = 1.5  # never less than this
    start_s: float = 1800.0  # before the session has opened
    idle_s: float = 600.0  # between steps (code that announced nothing), in saves, in a process's first steps
    section_s: float = 3600.0  # an announced section of a name not seen before
    look_s: float = 0.1  # how often somebody looks


class PageReading(NamedTuple):
    """One look at the page of one living worker."""

    member_id: MemberId
    rank: int
    step: int
    phase: Phase
    mark: tuple[int, ...]  # differs from the last one when the worker has moved
    step_s: float  # duration of the last committed step
    busy_s: float  # the same without waiting for peers
    section: str = ""  # the one it is in, or the last one that came to its end
    compiling: bool = False
    due: bool = False  # it was told to go on in place, and its main thread has not come to it
    meets: bool = False  # it waits between two steps for a word of all ranks: nobody takes long to say it
    left: bool = False  # its script has left its loops
    collectives: int = 0  # begun so far
    waits: bool = False  # one of them is under way
    stopped: bool = False  # its process does not run: whatever it was about to do takes no time
    done: int = 0  # steps that its process has committed
    scratch: bool = False  # not forked: it has imports to do that others found done
    age_s: float = 0.0  # of its process, where this is the first look at it

    @property
    def holds_nobody_up(self) -> bool:
        """It waits for the control plane, or is done."""
        return self.phase in WAITING and not self.due


class Learned(msgspec.Struct, frozen=True, kw_only=True):
    """What a successor goes on with: seconds of the recent steps, and between collectives where no session tells; the
    longest stillness survived, by kind."""

    steps: tuple[float, ...] = ()
    apart: tuple[float, ...] = ()
    peaks: dict[str, float] = {}


class Stall(NamedTuple):
    """How long each worker has been still, against its bound; ``waits``: its phase holds nobody up."""

    member_id: MemberId
    idle_s: float
    bound_s: float
    waits: bool
    stopped: bool


class _WorkerWatch:
    """One worker, as seen from outside."""

    def __init__(self, reading: PageReading) -> None:
        self.last = reading
        self.idle_s = 0.0
        self.section_s = 0.0  # longest stillness in the section that it is in
        self.busy: deque[float] = deque(maxlen=SAMPLES_MAX)


class Progress:
    """The workers of one node. ``look`` at them regularly.

    Args:
        learned: by a predecessor.
    """

    def __init__(self, limits: Limits, learned: Learned | None = None) -> None:
        found = learned or Learned()
        self.limits = limits
        self.stalled = False
        self._watches: dict[MemberId, _WorkerWatch] = {}
        self._steps = deque(found.steps, maxlen=SAMPLES_MAX)
        # Between collectives, before or without a session.
        self._apart = deque(found.apart, maxlen=SAMPLES_MAX)
        self._peaks = dict(found.peaks)
        self._looked_at = 0.0

    def learned(self) -> Learned:
        """For a successor."""
        return Learned(
            steps=tuple(self._steps),
            apart=tuple(self._apart),
            peaks=dict(self._peaks),
        )

    def look(self, now: float, readings: Sequence[PageReading]) -> bool | None:
        """Take one look at all living workers.

        Returns:
            True when they stand still since now, False when that is over, None when nothing changed.
        """
        passed_s = min(now - self._looked_at, 5 * self.limits.look_s) if self._looked_at else 0.0
        self._looked_at = now
        known, self._watches = self._watches, {}
        for reading in readings:
            member_id = reading.member_id
            watch = known.get(member_id) or self._first(reading)
            self._watches[member_id] = watch
            self._see(watch, reading, passed_s)
        if not self._steps:  # this one looks for the first time, at processes whose first steps nobody saw
            self._steps.extend(r.step_s for r in readings if r.done > SAMPLES_MIN)
        before, self.stalled = self.stalled, self._is_stalled()
        return None if before == self.stalled else self.stalled

    def knows(self, member_id: MemberId) -> bool:
        """This worker was there at the last look."""
        return member_id in self._watches

    def _first(self, reading: PageReading) -> _WorkerWatch:
        """Nobody saw the start of one that is past it by now: it took no longer than its process is old."""
        kind = _start(reading)
        past = reading.phase is not Phase.STARTING or reading.collectives > 0
        if past and kind not in self._peaks and not is_spare(reading.member_id):
            self._learn(kind, reading.age_s)
        return _WorkerWatch(reading)

    def stalls(self) -> list[Stall]:
        """Every worker's stillness, by member."""
        return [
            Stall(
                member_id,
                watch.idle_s,
                self.bound_s(watch.last),
                watch.last.holds_nobody_up,
                watch.last.stopped,
            )
            for member_id, watch in sorted(self._watches.items())
            if not is_spare(member_id)
        ]

    def late(self) -> list[Stall]:
        """Who has not done a step yet and would be too slow if it had started beside others that train."""
        return [
            Stall(member_id, watch.idle_s, bound_s, False, watch.last.stopped)
            for member_id, watch in sorted(self._watches.items())
            if not watch.last.holds_nobody_up
            and not watch.last.done
            and watch.idle_s >= (bound_s := self._alone_s(watch.last))
        ]

    def overdue(self) -> list[MemberId]:
        """Workers that have been still for longer than a step may be: is their process stopped?"""
        return [
            member_id
            for member_id, watch in sorted(self._watches.items())
            if not watch.last.holds_nobody_up and watch.idle_s >= self._frozen_s(watch.last)
        ]

    @property
    def step_s(self) -> float:
        """Median of the recent steps; 0: none was seen."""
        return median(self._steps) if self._steps else 0.0

    def paces(self) -> list[tuple[int, int, float]]:
        """(rank, samples, median seconds of a step without waiting for peers) of each worker."""
        return [
            (watch.last.rank, len(watch.busy), median(watch.busy))
            for _, watch in sorted(self._watches.items())
            if watch.busy
        ]

    def bound_s(self, reading: PageReading) -> float:
        """How long this worker may be still where it is."""
        limits, phase = self.limits, reading.phase
        known = _kind(reading) in self._peaks
        peak = self._peaks.get(_kind(reading), 0.0)
        if reading.stopped:
            return self._frozen_s(reading)
        if reading.due:
            return max(DUE_FLOORS * limits.floor_s, 3 * peak)
        if phase is Phase.STARTING:
            if reading.waits:
                return min(self._apart_s(), limits.start_s)
            return limits.start_s if not reading.collectives else limits.idle_s
        if phase is Phase.AFTER:
            return limits.section_s
        if phase is Phase.SECTION:
            return max(10 * limits.floor_s, 3 * peak) if known else limits.section_s
        if reading.meets:
            return max(self._usual_s(), 10 * limits.floor_s, 3 * peak)
        if reading.compiling or phase in (Phase.READY, Phase.SAVE):
            return max(limits.idle_s, 3 * peak)
        if reading.done < SAMPLES_MIN or not self._steps:
            return max(10 * limits.floor_s, 3 * peak) if known and self._steps else limits.idle_s
        if phase is Phase.LOADING:
            return max(self._usual_s(), 10 * limits.floor_s, 3 * peak)
        return max(self._usual_s(), 1.5 * peak)

    def _frozen_s(self, reading: PageReading) -> float:
        """How long a process may be stopped: it compiles nothing and waits for nothing, in its first steps either."""
        if self._steps:
            return self._usual_s()
        told = reading.phase is Phase.STARTING and len(self._apart) >= APART_MIN
        return self._apart_s() if told else 10 * self.limits.floor_s

    def _alone_s(self, reading: PageReading) -> float:
        """The same for one that starts while others train. What follows the start of its script is not the same as for
        others: it may have far to go in its data."""
        if reading.stopped:
            return self._frozen_s(reading)
        peak = self._peaks.get(_kind(reading), 0.0) if reading.phase is Phase.STARTING else 0.0
        return max(10 * self.limits.floor_s, self.limits.factor * peak) if peak else inf

    def _usual_s(self) -> float:
        return max(self.limits.floor_s, self.limits.factor * self.step_s)

    def _apart_s(self) -> float:
        """How long a collective may take where no session tells what the script does."""
        if len(self._apart) < APART_MIN:
            return self.limits.start_s
        peak = self._peaks.get(Phase.STARTING.name, 0.0)
        return max(10 * self.limits.floor_s, self.limits.factor * median(self._apart), 3 * peak)

    def _is_stalled(self) -> bool:
        holding = [w for m, w in self._watches.items() if not w.last.holds_nobody_up and not is_spare(m)]
        bounds_s = [self.bound_s(w.last) for w in holding]
        frozen_s = [s for w, s in zip(holding, bounds_s, strict=True) if w.last.stopped and w.idle_s >= s]
        # Where one is stopped, the others wait for it: what they might be doing is given no more time than this.
        most_s = max(10 * self.limits.floor_s, *frozen_s) if frozen_s else inf
        parted = self._parted(holding)
        return bool(holding) and all(
            w.idle_s >= min(s, most_s, self._usual_s() if w in parted else inf)
            for w, s in zip(holding, bounds_s, strict=True)
        )

    def _parted(self, holding: Sequence[_WorkerWatch]) -> list[_WorkerWatch]:
        """Where one has left its loop and others are in a block that it will not come to: these, and it. No step takes
        long that never ends."""
        left = [w.last.step for w in self._watches.values() if w.last.left]
        if not left or not any(w.last.phase in IN_STEP and w.last.step >= min(left) for w in holding):
            return []
        return [w for w in holding if w.last.phase in IN_STEP or (w.last.left and w.last.meets)]

    def _see(self, watch: _WorkerWatch, reading: PageReading, passed_s: float) -> None:
        last, watch.last = watch.last, reading
        watch.idle_s += passed_s
        if reading.mark == last.mark:
            return
        if is_spare(reading.member_id):  # nothing is learned from one that nobody waits for
            watch.idle_s = 0.0
            return
        if last.phase is Phase.SECTION:
            self._see_section(watch, last, reading)
        else:
            self._learn(_kind(last), watch.idle_s)
        if reading.section and reading.phase is not Phase.SECTION:
            # It may have been over before anybody looked.
            self._learn(f"section {reading.section}", self.limits.look_s)
        if last.phase is Phase.STARTING and last.collectives:
            self._apart.append(watch.idle_s)
        watch.idle_s = 0.0
        if reading.done == last.done:
            return
        if reading.done > SAMPLES_MIN:
            self._steps.append(reading.step_s)
            if reading.busy_s:
                watch.busy.append(reading.busy_s)
            keep = 0.5 ** (1 / (PEAK_STEPS * len(self._watches)))
            for kind in (phase.name for phase in IN_STEP):
                self._peaks[kind] = self._peaks.get(kind, 0.0) * keep

    def _see_section(self, watch: _WorkerWatch, last: PageReading, reading: PageReading) -> None:
        """One that moves in a section: what is quick in it tells nothing of the rest, so it is learned at its end."""
        watch.section_s = max(watch.section_s, watch.idle_s)
        if reading.phase is Phase.SECTION and reading.section == last.section:
            return
        if reading.section:  # else it was cut off, and may take longer
            self._learn(_kind(last), watch.section_s)
        watch.section_s = 0.0

    def _learn(self, kind: str, idle_s: float) -> None:
        if not self.stalled:
            self._peaks[kind] = max(idle_s, self._peaks.get(kind, 0.0))


def _kind(reading: PageReading) -> str:
    """What a stillness is compared with."""
    if reading.phase is Phase.SECTION:
        return f"section {reading.section}"
    if reading.due:
        return "resuming"
    if reading.meets:
        return "meets"
    if reading.compiling:
        return "compile"
    if reading.phase is Phase.STARTING and not reading.collectives:
        return _start(reading)
    if reading.phase in IN_STEP | {Phase.LOADING} and reading.done < SAMPLES_MIN:
        return f"first {reading.phase.name}"
    return reading.phase.name


def _start(reading: PageReading) -> str:
    return "imports" if reading.scratch else "first collective"
