"""The lookup of the run for a command: by the RUN argument (an id or a path), or the newest run."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import click

from holdfast.cli.screen.completers import run_names
from holdfast.errors import UsageError
from holdfast.runtime.node.run_settings import SETTINGS_FILE, RunSettings
from holdfast.runtime.node.rundir import RunDir
from holdfast.text import closest

RUNS = "runs"
NAMED_MAX = 4


def run_dir_option(command: Any) -> Any:
    """Add the option ``[--run-dir DIR]`` to a command, and return the command. All commands that read runs have it."""
    return click.option(
        "--run-dir",
        "--run_dir",
        default=RUNS,
        metavar="DIR",
        help="Directory that holds the runs.",
        show_default=True,
    )(command)


def run_argument(command: Any) -> Any:
    """Add ``[RUN] [--run-dir DIR]`` to a command, and return the command. All commands that read one run have them."""
    argument = click.argument("run", required=False, metavar="[RUN]", shell_complete=run_names)
    return argument(run_dir_option(command))


def find_run(asked: str | None, base: str) -> tuple[RunDir, RunSettings]:
    """Find a run, and return its directory and its settings.

    Args:
        asked: id of the run (its beginning is enough), or path of its directory; None means the newest run.
        base: the directory that contains the runs.

    Raises:
        UsageError: there is no such run.
    """
    path = _newest(Path(base)) if asked is None else _named(asked, Path(base))
    return RunDir(path), RunSettings.load(path)


def name_of(run: Path) -> str:
    """Return the RUN argument by which a command finds this run from the working directory, quoted for a shell.

    Args:
        run: the directory of the run.
    """
    try:
        default = run.parent.samefile(RUNS)
    except OSError:  # the working directory has no default directory of runs
        default = False
    return shlex.quote(run.name if default else str(run))


def runs_below(base: Path) -> list[Path]:
    """Return the run directories below ``base``, newest first."""
    found = [p.parent for p in base.glob(f"*/{SETTINGS_FILE}")] if base.is_dir() else []
    return sorted(found, key=lambda p: (p / SETTINGS_FILE).stat().st_mtime_ns, reverse=True)


def _newest(base: Path) -> Path:
    found = runs_below(base)
    if not found:
        raise UsageError(
            f"there is no run below {base.absolute()}",
            hint="holdfast run train.py, or name the place: --run-dir DIR, or the path of a run",
        )
    return found[0]


def _named(asked: str, base: Path) -> Path:
    for path in (Path(asked), base / asked):
        if (path / SETTINGS_FILE).is_file():
            return path
    names = [p.name for p in runs_below(base)]
    starting = [name for name in names if name.startswith(asked)]
    if len(starting) == 1:
        return base / starting[0]
    if len(starting) > 1:
        more = f" and {len(starting) - NAMED_MAX} more" if len(starting) > NAMED_MAX else ""
        raise UsageError(
            f"{asked} begins the names of {len(starting)} runs: {', '.join(starting[:NAMED_MAX])}{more}",
            hint=f"name one of them; the newest is {starting[0]}",
        )
    close = closest(asked, names)
    newest = f"the newest is {names[0]}" if names else "holdfast run train.py"
    hint = f"did you mean {close}?" if close else newest
    raise UsageError(f"there is no run {asked} (looked in {base.absolute()} and for a directory)", hint=hint)
