"""The command ``holdfast gc``, which removes the directories of ended runs.

Rules:
1. A run is removed only if its end is in its event log (or ``--lost`` is given), none of its processes lives, and
   ``--days`` and ``--keep`` allow it.
2. Checkpoints, and files that Holdfast did not make, are removed only if the user names their run with
   ``--checkpoints-of``.
3. A directory that another user could have made is not touched.
4. ``run.json`` is removed last. A partly removed directory is therefore still a run for the next ``holdfast gc``.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import click
import msgspec

from holdfast.cli.commands.ls import Listed, looked_at
from holdfast.cli.screen.escaping import echo, echo_json
from holdfast.cli.screen.fault_report import REPORTS
from holdfast.cli.screen.run_lookup import run_dir_option
from holdfast.cli.screen.run_view import RunView
from holdfast.cli.start.finite_number import FiniteNumber
from holdfast.errors import UsageError
from holdfast.runtime.node.file_owners import doubt
from holdfast.runtime.node.run_processes import processes
from holdfast.runtime.node.run_settings import ARGUMENTS_FILE, SETTINGS_FILE
from holdfast.runtime.node.rundir import ATTEMPT_NAME, RunDir, is_free, try_lock
from holdfast.text import closest, plural

DAY_S = 86400.0
NAMED_MAX = 3
_OWN = frozenset({
    SETTINGS_FILE, ARGUMENTS_FILE, REPORTS, "events.jsonl", "token", "pages", "ballot.json", "peers.json", "agent.lock",
    "launcher.lock", "agent.json", "controller.json", "zygote.json", "agent.log", "controller.log", "zygote.log",
    "spares", "room", "kv.log",
})  # fmt: skip
_TEMPORARY = re.compile(r"\.[a-z0-9.-]+\.\d+\.[0-9a-f]{8}")
"""Pattern of the names of temporary files that an interrupted write has left."""
_LOG = re.compile(r"rank-\d+\.(log|error\.json|env\.jsonl)")
"""Pattern of the names of the files in a log directory."""


class RemovedRuns(msgspec.Struct):
    """The result of ``holdfast gc``.

    Attributes:
        removed: names of the removed runs; after ``--dry-run``, of the runs that would be removed.
        spared: reason why a run stays, by its name.
        size_bytes: total size of the runs in ``removed``.
        dry_run: True if nothing was removed.
    """

    removed: list[str]
    spared: dict[str, str]
    size_bytes: int
    dry_run: bool


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@run_dir_option
@click.option(
    "--days", type=FiniteNumber(min=0), metavar="N", help="Remove runs that ended more than N days ago."
)
@click.option("--keep", type=click.IntRange(min=0), metavar="N", help="Remove runs beyond the newest N.")
@click.option("--checkpoints-of", "whole", multiple=True, metavar="RUN",
              help="Remove with RUN what it saved in its directory and your own files there; repeatable.")  # fmt: skip
@click.option("--lost", is_flag=True, help="Also runs whose end is not on record and of which no process is left here: "
              "only where no other host uses DIR.")  # fmt: skip
@click.option("--dry-run", is_flag=True, help="Only say what would be removed.")
@click.option("--json", "as_json", is_flag=True, help="What was removed and what stays, as one JSON object.")
def gc(
    run_dir: str,
    days: float | None,
    keep: int | None,
    whole: tuple[str, ...],
    lost: bool,
    dry_run: bool,
    as_json: bool,
) -> int:
    """Remove the directories (logs, events, reports) of runs that have ended. With --days and --keep both must hold.

    A run with a living process is kept. A run that holds checkpoints is kept unless --checkpoints-of names it.
    """
    if days is None and keep is None:
        raise UsageError(
            "name what may go: --days N, --keep N, or both", hint="holdfast gc --days 30 --dry-run"
        )
    base = Path(run_dir)
    runs = list(looked_at(base))
    _check_named(whole, [one.name for one, _ in runs])
    done = RemovedRuns([], {}, 0, dry_run)
    for number, (one, view) in enumerate(runs):
        if (keep is not None and number < keep) or (days is not None and _ended_s(one) <= days * DAY_S):
            continue
        path = base / one.name
        why = _stays(path, one, view, lost) or _in_use(path, runs)
        if not why and one.name not in whole:
            why = _holds(path)
        size_bytes = 0 if why else _size_bytes(path)
        if not why and not dry_run:
            why = _remove(path)
        if why:
            done.spared[one.name] = why
        else:
            done.removed.append(one.name)
            done.size_bytes += size_bytes
    if as_json:
        echo_json(msgspec.json.encode(done))
    else:
        _say(done, base)
    return 0


def _check_named(whole: Sequence[str], names: list[str]) -> None:
    """Refuse names of runs that do not exist, so that a mistyped name is noticed. Raises: UsageError."""
    for name in whole:
        if name not in names:
            close = closest(name, names)
            raise UsageError(
                f"--checkpoints-of {name}: there is no such run",
                hint=f"did you mean {close}?" if close else "holdfast ls",
            )


def _ended_s(one: Listed) -> float:
    """Return the seconds since the end of a run. If its event log has no end, return the seconds since its start."""
    return one.age_s if one.ended_s is None else one.ended_s


def _stays(path: Path, one: Listed, view: RunView, lost: bool) -> str:
    """Return why a run must stay whatever its content is; empty if there is no such reason."""
    if why := doubt(path):
        return why
    run = RunDir(path)
    if view.state not in ("ended", "lost") or any(rank.alive for rank in view.ranks):
        return f"it is {one.state}"
    if not is_free(run.launcher_lock) or not is_free(run.agent_lock) or any(processes(run)):
        return "it has living processes"
    if view.state == "lost" and not lost:
        return "its end is not on record; it may run on another host (else: --lost)"
    return ""


def _in_use(path: Path, runs: Iterable[tuple[Listed, RunView]]) -> str:
    """Return which other active run saves its checkpoints in the directory ``path``, as text; empty if none does."""
    own = path.resolve()
    for one, view in runs:
        if (
            view.state != "ended"
            and one.name != path.name
            and view.root
            and Path(view.root).resolve().is_relative_to(own)
        ):
            return f"{one.name} saves its checkpoints there"
    return ""


def _holds(path: Path) -> str:
    """Return why the content of a run must stay (checkpoints, or files of the user); empty if it may be removed."""
    checkpoints = RunDir(path).checkpoints
    if checkpoints.is_dir() and not checkpoints.is_symlink() and any(checkpoints.iterdir()):
        return f"it holds checkpoints (to remove them, too: --checkpoints-of {path.name})"
    others = sorted(name for name in _others(path) if name != checkpoints.name)
    if not others:
        return ""
    more = f" and {len(others) - NAMED_MAX} more" if len(others) > NAMED_MAX else ""
    named = ", ".join(others[:NAMED_MAX])
    return f"it holds files that are not Holdfast's: {named}{more} (to remove them, too: --checkpoints-of {path.name})"


def _others(path: Path) -> Iterator[str]:
    """Yield the names of the entries of a run directory and of its log directories that Holdfast has not made."""
    for entry in path.iterdir():
        if ATTEMPT_NAME.fullmatch(entry.name) and entry.is_dir() and not entry.is_symlink():
            names = (each.name for each in entry.iterdir())
            yield from (
                f"{entry.name}/{n}" for n in names if not (_LOG.fullmatch(n) or _TEMPORARY.fullmatch(n))
            )
        elif entry.name not in _OWN and not _TEMPORARY.fullmatch(entry.name):
            yield entry.name


def _size_bytes(path: Path) -> int:
    return sum(
        os.lstat(os.path.join(place, name)).st_blocks * 512
        for place, _, names in os.walk(path)
        for name in names
    )


def _remove(path: Path) -> str:
    """Remove the directory of a run. Return why it could not be removed; empty if it was removed.

    The launcher's lock of the run is held during the removal, so that another start of the run waits.
    """
    with ExitStack() as held:
        try:
            # Use the descriptor of the directory: a new start of the run may give its name to another directory.
            fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            held.callback(os.close, fd)
            lock = try_lock(Path(f"/proc/self/fd/{fd}") / RunDir(path).launcher_lock.name)
            if lock is None:
                return "it has just been started again"
            held.callback(os.close, lock)
            RunDir(path).remove_pages()
            with os.scandir(fd) as entries:
                rest = [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in entries]
            for name, is_directory in rest:
                if is_directory:
                    shutil.rmtree(name, dir_fd=fd)
                elif name != SETTINGS_FILE:
                    os.unlink(name, dir_fd=fd)
            os.unlink(SETTINGS_FILE, dir_fd=fd)
            path.rmdir()
        except OSError as error:
            return f"it cannot be removed: {error.strerror}: {error.filename}"
    return ""


def _say(done: RemovedRuns, base: Path) -> None:
    for name, why in done.spared.items():
        echo(f"stays {name}: {why}")
    for name in done.removed:
        echo(f"{'would remove' if done.dry_run else 'removed'} {name}")
    if not done.removed:
        echo(f"nothing to remove below {base.absolute()}")
        return
    doing = "would be freed" if done.dry_run else "freed"
    echo(f"{plural(len(done.removed), 'run')}, {done.size_bytes / 1e6:,.1f} MB {doing}")
