"""Excerpts from the logs of a failed run, for a reader of the verdict (in CI) without access to the files."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec

from holdfast import event_log
from holdfast.history.run_history import RunHistory
from holdfast.runtime.node.run_settings import SETTINGS_FILE, RunSettings
from holdfast.runtime.node.rundir import RunDir, last_lines, log_path
from holdfast.runtime.node.spawn import log_root

LINES_MAX = 20
LINES_READ_MAX = 400
LINE_LENGTH_MAX = 200
TRACEBACK = "Traceback (most recent call last):"
OWN_DOING = ("exception", "exit")
"""Kinds of faults whose cause is in the log of the rank, the most informative kind first."""


class Excerpt(msgspec.Struct, frozen=True):
    """The last lines of one log file, at most ``LINES_MAX`` lines.

    If the file has a traceback, the lines begin with its last traceback.
    """

    path: str
    lines: list[str]

    @staticmethod
    def of(path: Path) -> Excerpt:
        """Return the excerpt of the log at ``path``; an excerpt without lines if there is no log."""
        found = [line[:LINE_LENGTH_MAX] for line in last_lines(path, LINES_READ_MAX)]
        begin = max(
            (at for at, line in enumerate(found) if TRACEBACK in line), default=len(found) - LINES_MAX
        )
        found = found[max(0, begin) :]
        if len(found) > LINES_MAX:
            found = [found[0], "...", *found[2 - LINES_MAX :]]
        return Excerpt(str(path), found)


def launcher_log(directory: Path) -> Path:
    """Return the path of the file with the launcher's output, for the run in ``directory``."""
    return directory.with_suffix(".log")


def last_words(directory: Path) -> list[Excerpt]:
    """Return excerpts of the run's logs for its verdict.

    One excerpt is from the launcher's output, another from the log of the rank that :func:`failed_first` returns.
    """
    logs = [launcher_log(directory)]
    if (directory / SETTINGS_FILE).exists():
        run = RunDir(directory)
        first = failed_first(event_log.read(run.journal).events)
        if first is not None:
            logs.append(log_path(log_root(run, RunSettings.load(directory)), *first))
    return [excerpt for excerpt in map(Excerpt.of, logs) if excerpt.lines]


def failed_first(events: Iterable[event_log.Event]) -> tuple[int, int] | None:
    """Return ``(attempt, rank)`` of the first unhandled exception, otherwise of the first exit; None without either.

    Only faults since the last recovery are searched. ``attempt`` is the number of the start of all workers.
    """
    faults = RunHistory.read(events).unanswered
    return next(((f.attempt, f.rank) for kind in OWN_DOING for f in faults if f.kind == kind), None)


def text(excerpts: Sequence[Excerpt]) -> str:
    """Return the excerpts as indented text, each below the path of its file."""
    return "\n".join(
        line for each in excerpts for line in (f"  {each.path}:", *(f"    {line}" for line in each.lines))
    )
