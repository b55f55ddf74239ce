"""Detection of workers without progress, with time limits learned from how long progress usually takes.

Theory. A worker *moves* when its status page changes: a phase, a collective, a step. All ranks of a job meet in the
vote of each step, so when one rank stops forever, soon all ranks stop. A node is *stalled* when each of its workers
has made no progress for longer than that worker's time limit. A rank that waits for a slow rank exceeds its own limit
early. That is harmless, because the limit of the slow rank counts. Which rank is to blame is decided later
(``core/watch/hang_attribution.py``).

Time limits (bounds) come from robust statistics. A limit is a factor times the median of the recent steps. It has a
fixed minimum, and is at least a multiple of the longest pause in the same phase after which a worker moved again.
Before there are samples, the limits are generous. Outside of steps they are also generous: the script announces
sections by name, and their limits are learned by name. A script without a session shows only its collectives. A
collective in progress has a limit learned from the time between collectives; other code of such a script has a
generous limit.

A process that starts while the other ranks train (a newcomer, a spare) is judged alone. It is *late* when it is
stopped, or when it has made no progress for many times the duration of other starts.

Invariants:
1. A stall is reported once, and withdrawn once when any worker moves.
2. Time without a look does not count against a worker: a frozen or overloaded host kills no worker.
3. This module reads no clock: ``now`` is an argument, in seconds.
4. Learned values outlive their agent: a successor that receives them judges as its predecessor did. Without them, the
   status pages show the duration of the last step, so a later step does not get the time limit of a first step.
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
"""Phases in which a worker waits for the control plane or is done, so that it delays no other rank."""
IN_STEP = frozenset({Phase.MEET, Phase.FORWARD, Phase.BACKWARD, Phase.VOTE, Phase.UPDATE, Phase.COMMIT})
SAMPLES_MAX = 64
SAMPLES_MIN = 3  # committed steps of a process before its limit is learned
# Time limit in floors for all ranks to rebuild their connections: thousands of ranks may have to meet.
DUE_FLOORS = 80
APART_MIN = 20  # changes of the page of a script without a session before its limit is learned
PEAK_STEPS = 64  # steps in which the weight of a survived pause falls to one half


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """The constants from which time limits are computed; in seconds unless the name says otherwise."""

    factor: float = 10.0  # time limit in median steps; 0: hangs are not detected
    floor_s: float = 1.5  # smallest time limit
    start_s: float = 1800.0  # before the session has opened
    # Between steps (code that announced nothing), in saves, in the first steps of a process.
    idle_s: float = 600.0
    section_s: float = 3600.0  # an announced section of a name not seen before
    look_s: float = 0.1  # interval of the looks


class PageReading(NamedTuple):
    """The result of one look at the status page of one living worker."""

    member_id: MemberId
    rank: int
    step: int
    phase: Phase
    mark: tuple[int, ...]  # differs from the mark of the last look if the worker has moved
    step_s: float  # duration of the last committed step
    busy_s: float  # duration of the last committed step without waits for peers
    section: str = ""  # name of its present section, or of the last section that ended
    compiling: bool = False
    outside: int = (
        0  # collectives of all ranks that its script has made outside of blocks since its last block
    )
    due: bool = False  # it was ordered to continue in place, and its main thread has not reacted yet
    meets: bool = False  # it waits between two steps for an agreement of all ranks, which never takes long
    left: bool = False  # its script has left its loops
    collectives: int = 0  # begun so far
    waits: bool = False  # a collective is in progress, at the start or in a script without a session
    joins_in: bool = False  # a collective of the script is in progress between two steps
    stopped: bool = False  # its process is stopped: its phase gives it no extra time
    done: int = 0  # steps that its process has committed
    scratch: bool = False  # the process was not forked, so it does the imports that a forked process inherits
    age_s: float = 0.0  # age of its process, at the first look

    @property
    def holds_nobody_up(self) -> bool:
        """True if the worker waits for the control plane or is done, so that it delays no other rank."""
        return self.phase in WAITING and not self.due


class Learned(msgspec.Struct, frozen=True, kw_only=True):
    """The learned values that an agent passes to its successor.

    Attributes:
        steps: seconds of the recent steps.
        apart: seconds between collectives, of a script without a session.
        peaks: the longest pause in seconds after which a worker moved again, by kind of code.
    """

    steps: tuple[float, ...] = ()
    apart: tuple[float, ...] = ()
    peaks: dict[str, float] = {}


class Stall(NamedTuple):
    """The time without progress of one worker and its limit, in seconds.

    ``waits``: in its phase the worker delays no other rank. ``stopped``: its process is stopped.
    """

    member_id: MemberId
    idle_s: float
    bound_s: float
    waits: bool
    stopped: bool


class _WorkerWatch:
    """The observations of one worker so far."""

    def __init__(self, reading: PageReading) -> None:
        self.last = reading
        self.idle_s = 0.0
        self.section_s = 0.0  # longest pause in its present section
        self.busy: deque[float] = deque(maxlen=SAMPLES_MAX)


class Progress:
    """The progress of the workers of one node. The agent calls ``look`` regularly.

    Args:
        limits: the constants of the time limits.
        learned: learned values of a predecessor of this agent; None if there are none.
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
        """Return the learned values, for the agent that succeeds this one."""
        return Learned(
            steps=tuple(self._steps),
            apart=tuple(self._apart),
            peaks=dict(self._peaks),
        )

    def look(self, now: float, readings: Sequence[PageReading]) -> bool | None:
        """Record one look at all living workers.

        Returns:
            True if the node has just stalled, False if a stall has just ended, None if neither has happened.
        """
        passed_s = min(now - self._looked_at, 5 * self.limits.look_s) if self._looked_at else 0.0
        self._looked_at = now
        known, self._watches = self._watches, {}
        for reading in readings:
            member_id = reading.member_id
            watch = known.get(member_id) or self._first(reading)
            self._watches[member_id] = watch
            self._see(watch, reading, passed_s)
        if not self._steps:  # the first look of this agent, at processes whose first steps it did not see
            self._steps.extend(r.step_s for r in readings if r.done > SAMPLES_MIN)
        before, self.stalled = self.stalled, self._is_stalled()
        return None if before == self.stalled else self.stalled

    def knows(self, member_id: MemberId) -> bool:
        """Return True if the last look included this worker."""
        return member_id in self._watches

    def _first(self, reading: PageReading) -> _WorkerWatch:
        """Begin to watch a worker.

        If the start of the worker is over already, learn that the start took at most the age of its process.
        """
        kind = _start(reading)
        past = reading.phase is not Phase.STARTING or reading.collectives > 0
        if past and kind not in self._peaks and not is_spare(reading.member_id):
            self._learn(kind, reading.age_s)
        return _WorkerWatch(reading)

    def stalls(self) -> list[Stall]:
        """Return the time without progress and the time limit of every worker that is not a spare, by member id."""
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
        """Return the workers whose start takes too long: they have done no step yet, while the other ranks train."""
        return [
            Stall(member_id, watch.idle_s, bound_s, False, watch.last.stopped)
            for member_id, watch in sorted(self._watches.items())
            if not watch.last.holds_nobody_up
            and not watch.last.done
            and watch.idle_s >= (bound_s := self._alone_s(watch.last))
        ]

    def overdue(self) -> list[MemberId]:
        """Return the workers without progress for longer than a step may take.

        The agent checks whether their processes are stopped.
        """
        return [
            member_id
            for member_id, watch in sorted(self._watches.items())
            if not watch.last.holds_nobody_up and watch.idle_s >= self._frozen_s(watch.last)
        ]

    @property
    def step_s(self) -> float:
        """The median duration of the recent steps in seconds; 0 if no step was seen."""
        return median(self._steps) if self._steps else 0.0

    def paces(self) -> list[tuple[int, int, float]]:
        """Return (rank, number of measured steps, median seconds of a step without waits for peers) of each worker."""
        return [
            (watch.last.rank, len(watch.busy), median(watch.busy))
            for _, watch in sorted(self._watches.items())
            if watch.busy
        ]

    def bound_s(self, reading: PageReading) -> float:
        """Return the time limit for this worker in its present phase, in seconds."""
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
        """Return the time limit of a worker whose process is stopped, in seconds.

        The phase of the worker gives it no extra time, not even in its first steps.
        """
        if self._steps:
            return self._usual_s()
        told = reading.phase is Phase.STARTING and len(self._apart) >= APART_MIN
        return self._apart_s() if told else 10 * self.limits.floor_s

    def _alone_s(self, reading: PageReading) -> float:
        """Return the time limit of a process that starts while others train, in seconds.

        After its start-up phase the process has no limit: unlike others, it may have to skip much of its data.
        """
        if reading.stopped:
            return self._frozen_s(reading)
        peak = self._peaks.get(_kind(reading), 0.0) if reading.phase is Phase.STARTING else 0.0
        return max(10 * self.limits.floor_s, self.limits.factor * peak) if peak else inf

    def _usual_s(self) -> float:
        return max(self.limits.floor_s, self.limits.factor * self.step_s)

    def _apart_s(self) -> float:
        """Return the time limit of a collective in progress, in seconds, for a script without a session."""
        if len(self._apart) < APART_MIN:
            return self.limits.start_s
        peak = self._peaks.get(Phase.STARTING.name, 0.0)
        return max(10 * self.limits.floor_s, self.limits.factor * median(self._apart), 3 * peak)

    def _is_stalled(self) -> bool:
        holding = [w for m, w in self._watches.items() if not w.last.holds_nobody_up and not is_spare(m)]
        bounds_s = [self.bound_s(w.last) for w in holding]
        frozen_s = [s for w, s in zip(holding, bounds_s, strict=True) if w.last.stopped and w.idle_s >= s]
        # When one process is stopped, the others wait for it, so their phases give them at most this time.
        most_s = max(10 * self.limits.floor_s, *frozen_s) if frozen_s else inf
        parted, lone = [*self._parted(holding), *self._unmatched(holding)], self._lone(holding)
        usual_s, lone_s = self._usual_s(), max(self._usual_s(), 10 * self.limits.floor_s)
        return bool(holding) and all(
            w.idle_s >= min(s, most_s, usual_s if w in parted else lone_s if w in lone else inf)
            for w, s in zip(holding, bounds_s, strict=True)
        )

    def _parted(self, holding: Sequence[_WorkerWatch]) -> list[_WorkerWatch]:
        """Return the workers that wait for a rank that has left its loop, and this rank.

        The result is empty if no rank has left its loop. Such a rank never enters the block of the others, so these
        workers get no more time than a usual step takes.
        """
        left = [w.last.step for w in self._watches.values() if w.last.left]
        if not left or not any(w.last.phase in IN_STEP and w.last.step >= min(left) for w in holding):
            return []
        return [w for w in holding if w.last.phase in IN_STEP or (w.last.left and w.last.meets)]

    def _lone(self, holding: Sequence[_WorkerWatch]) -> list[_WorkerWatch]:
        """Return the workers that wait between two steps for a worker in the block of that step, and this worker.

        A worker between two steps waits in a collective of the script or for an agreement. The worker in the block has
        left that code, or never comes to it. So both get a short limit, also in the first steps of a process.
        """
        between = [w for w in holding if w.last.meets or (w.last.phase is Phase.READY and w.last.joins_in)]
        inside = [w for w in holding if w.last.phase in IN_STEP]
        steps = {w.last.step for w in between} & {w.last.step for w in inside}
        return [w for w in (*between, *inside) if w.last.step in steps]

    def _unmatched(self, holding: Sequence[_WorkerWatch]) -> list[_WorkerWatch]:
        """Return the workers that wait in a collective which other workers leave out, and those other workers.

        The other workers are already in the next block, or wait for an agreement of all ranks. So they make no more
        collectives before it. The result is empty if no worker made more. All these workers get no more time than a
        usual step takes.
        """
        final = [w for w in holding if w.last.phase in IN_STEP or w.last.meets]
        more = [
            w
            for w in holding
            if any(f.last.step == w.last.step and f.last.outside < w.last.outside for f in final)
        ]
        return [*more, *final] if more else []

    def _see(self, watch: _WorkerWatch, reading: PageReading, passed_s: float) -> None:
        last, watch.last = watch.last, reading
        watch.idle_s += passed_s
        if reading.mark == last.mark:
            return
        if is_spare(reading.member_id):  # nothing is learned from a spare: no rank waits for it
            watch.idle_s = 0.0
            return
        if last.phase is Phase.SECTION:
            self._see_section(watch, last, reading)
        else:
            self._learn(_kind(last), watch.idle_s)
        if reading.section and reading.phase is not Phase.SECTION:
            # The section may have ended before the first look.
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
        """Learn the longest pause of a section when the worker leaves the section.

        A limit learned earlier, from quick parts of the section, would be too short for the rest.
        """
        watch.section_s = max(watch.section_s, watch.idle_s)
        if reading.phase is Phase.SECTION and reading.section == last.section:
            return
        if reading.section:  # otherwise an exception ended it, and it may take longer
            self._learn(_kind(last), watch.section_s)
        watch.section_s = 0.0

    def _learn(self, kind: str, idle_s: float) -> None:
        if not self.stalled:
            self._peaks[kind] = max(idle_s, self._peaks.get(kind, 0.0))


def _kind(reading: PageReading) -> str:
    """Return the name of the kind of code that the worker runs. A pause is compared with pauses of the same kind."""
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
