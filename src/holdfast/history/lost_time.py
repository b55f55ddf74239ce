"""The time of a run in which no training progressed, by cause, from its event log.

Theory. Goodput is the time of a run without these times:
- its **start** (until all sessions are open),
- times in which the run **stands still** (until a hang is found),
- **recoveries** (from a fault to the next committed step),
- steps that are **redone**,
- the time that steps wait for a **save**,
- the time in which the other ranks wait for **slow** ranks,
- its **end** (from the last step until all processes are gone).
The time of redone steps is computed as a share of the remaining time, as if all steps took equally long.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from holdfast.event_log import Event

START, STILL, RECOVERY, REDONE, SAVING, SLOW, END = (
    "start", "standing still", "recovery", "steps redone", "saving", "slow ranks", "end",
)  # fmt: skip
Times = tuple[float, float]  # from, to; Unix time


class Straggler(NamedTuple):
    """A slow rank.

    Attributes:
        since: when it was found slow; Unix time.
        ratio: its step time divided by the step time of the other ranks.
        busy_s: its median step time.
    """

    since: float
    ratio: float
    busy_s: float

    def lost_s(self, until: float) -> float:
        """Return for how many seconds, up to the Unix time ``until``, the other ranks have waited for this rank."""
        return (1.0 - 1.0 / self.ratio) * max(0.0, until - self.since)


class LostTime:
    """The sums of the lost times, from the events of a log."""

    def __init__(self) -> None:
        self._opened_at = 0.0
        self._finished_at = 0.0
        self._still_from = 0.0
        self._still: list[Times] = []
        self._saves: dict[tuple[int, str], float] = {}  # step, kind -> the longest wait of a rank
        self.slow: dict[int, Straggler] = {}  # by rank
        self._slow_s = 0.0  # seconds lost by ranks that are no longer slow

    def take(self, event: Event) -> None:
        """Apply one event of the log, of any kind."""
        data = event.data
        match event.kind:
            case "session_opened":
                self._opened_at = self._opened_at or event.t_wall
            case "finished":
                self._finished_at = event.t_wall
            case "stalled":
                self._still_from = event.t_wall - float(data["idle_s"])
            case "moved" | "detected":
                if self._still_from:
                    self._still.append((self._still_from, event.t_wall))
                self._still_from = 0.0
            case "saved":
                waits = "stall_s" if data["save_kind"] == "periodic" else "duration_s"
                waited_s = float(data.get(waits, 0.0))  # older versions have not written this field
                save = int(data["step"]), str(data["save_kind"])
                self._saves[save] = max(waited_s, self._saves.get(save, 0.0))
            case "straggler":
                rank = int(data["rank"])
                self._end_slow(event.t_wall, [rank])  # a new controller may find a known slow rank again
                self.slow[rank] = Straggler(event.t_wall, float(data["ratio"]), float(data["busy_s"]))
            case "straggler_gone":
                self._end_slow(event.t_wall, [int(data["rank"])])
            case "members_replaced":
                self._end_slow(event.t_wall, list(data["ranks"]))
            case "generation_started" if not data.get("in_place"):
                self._end_slow(event.t_wall, list(self.slow))

    def _end_slow(self, at: float, ranks: Iterable[int]) -> None:
        for rank in ranks:
            if rank in self.slow:
                self._slow_s += self.slow.pop(rank).lost_s(at)

    def seconds(
        self, begun: float, now: float, recoveries: Sequence[Times], still_s: float, steps: tuple[int, int]
    ) -> dict[str, float]:
        """Return the lost seconds by cause. Causes that lost no time are left out.

        Args:
            begun: start of the run; Unix time.
            now: the present time, or the end of the run; Unix time.
            recoveries: start and end of the recovery of each fault; Unix time.
            still_s: seconds since any rank made progress.
            steps: the number of steps that the job has made, each counted once, and the number of redone steps.
        """
        opened = self._opened_at or now
        still = [*self._still, (now - still_s, now)]
        recovering_s = _covered(recoveries, opened, now)
        found = {
            START: max(0.0, min(opened, now) - begun),
            STILL: _covered([*still, *recoveries], opened, now) - recovering_s,
            RECOVERY: recovering_s,
            SAVING: sum(self._saves.values()),
            SLOW: self._slow_s + sum(straggler.lost_s(now) for straggler in self.slow.values()),
            END: max(0.0, now - self._finished_at) if self._finished_at else 0.0,
        }
        left_s = max(0.0, now - begun - sum(found.values()))
        count, again = steps
        found[REDONE] = left_s * again / max(count + again, 1)
        return {cause: round(lost_s, 3) for cause, lost_s in found.items() if round(lost_s, 3) > 0}


def _covered(times: Iterable[Times], first: float, last: float) -> float:
    """Return the seconds between ``first`` and ``last`` that lie in at least one of the given intervals."""
    covered_s, until = 0.0, first
    for begin, end in sorted(times):
        covered_s += max(0.0, min(end, last) - max(begin, until))
        until = max(until, min(end, last))
    return covered_s
