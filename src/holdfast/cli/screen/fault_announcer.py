"""The console lines about faults. A mistake of the script often fails on all ranks; it is printed only once.

Invariants:
1. Each printed fault is named by its number and its rank.
2. Exceptions whose texts differ only in numbers mostly have one cause. The log of only one of their ranks is shown.
3. A rank that exits because of another rank's fault only reports that fault in its output. Its log is not shown.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby, takewhile

from holdfast.cli.screen.console import Screen
from holdfast.cli.screen.run_summary import fault_what
from holdfast.cli.screen.run_view import Watch, log_of
from holdfast.core.job.fault import LEFT_FOR_RESTART
from holdfast.history.run_history import FaultView
from holdfast.runtime.node.rundir import last_lines
from holdfast.runtime.worker.user_exception import NUMBER
from holdfast.text import noun_of, plural, ranges


class FaultAnnouncer:
    """The printer of new faults and of new recoveries of a run.

    Args:
        watch: the reader of the run's state.
        shown: called with (attempt of the run, rank); returns True if the console already shows the log of that rank.
    """

    def __init__(self, watch: Watch, shown: Callable[[int, int], bool]) -> None:
        self._watch = watch
        self._shown = shown
        self._faults = 0  # number of printed faults
        self._recoveries = 0
        self._raised: set[str] = set()  # exceptions whose log was shown

    def faults(self, screen: Screen) -> None:
        """Print the new faults, with the last lines of each failed rank whose log the console does not show."""
        faults = self._watch.story.faults
        for group in _gathered(faults[self._faults :], _words):
            screen.say(_text(group))
            for fault in sorted(group, key=lambda f: not self._shown(f.attempt, f.rank)):
                self._show_last_lines(screen, fault)
        self._faults = len(faults)

    def recoveries(self, screen: Screen, before: Callable[[], object]) -> None:
        """Print the recoveries that have ended since the last call. If there are any, call ``before()`` first."""
        faults = self._watch.story.faults[self._recoveries :]
        if not (over := list(takewhile(lambda fault: fault.recovered_s is not None, faults))):
            return
        self._recoveries += len(over)
        before()
        for group in _gathered(over, lambda fault: (_words(fault), fault.action, fault.steps_lost)):
            screen.say(f"{_names(group)}: {_answered(group[0], self._watch.story.session)}")

    def _show_last_lines(self, screen: Screen, fault: FaultView) -> None:
        if fault.kind in ("exception", "device"):
            if _words(fault) in self._raised:
                return
            self._raised.add(_words(fault))
        if fault.what == LEFT_FOR_RESTART or self._shown(fault.attempt, fault.rank):
            return
        log = log_of(fault, self._watch.directory, self._watch.settings)
        end = self._watch.story.exits.get(fault.member_id, {}).get("log_size_bytes")
        for line in last_lines(log, end=end) if log else ():
            screen.rank(fault.rank, line, always_marked=True)


def _text(faults: Sequence[FaultView]) -> str:
    """Return one line about equal faults: ``F001 to F003: ranks 0-2: ...``."""
    ranks = sorted({fault.rank for fault in faults})
    return f"{_names(faults)}: {noun_of(len(ranks), 'rank')} {ranges(ranks)}: {fault_what(faults[0])}"


def _answered(fault: FaultView, session: bool) -> str:
    """Return a text about the answer to a fault.

    Without a ``session``, the text does not say that training continues, because Holdfast does not know it.
    """
    if not session:
        return f"all workers were started again after {fault.recovered_s:.2f} s"
    lost = f"{plural(fault.steps_lost, 'step')} lost, " if fault.steps_lost else ""
    return f"{fault.action.replace('_', ' ')}, {lost}training continues after {fault.recovered_s:.2f} s"


def _words(fault: FaultView) -> str:
    """Return the text by which faults are compared: the text of the fault without all numbers (ranks, steps, ...)."""
    return NUMBER.sub("", fault_what(fault))


def _gathered(
    faults: Sequence[FaultView], alike: Callable[[FaultView], str | tuple[str, str, int]]
) -> list[list[FaultView]]:
    """Return the faults in their order, grouped into lists of consecutive faults with equal values of ``alike``."""
    return [list(group) for _, group in groupby(faults, alike)]


def _names(faults: Sequence[FaultView]) -> str:
    return faults[0].name if len(faults) == 1 else f"{faults[0].name} to {faults[-1].name}"
