"""The reuse of a run id: the files of the previous start are moved aside, but the checkpoints keep their path.

A scheduler that requeues a job repeats the command with its ``--run-id``. So does a user who follows the hint in the
last line of a run. The run directory of the newest start has the plain name ``ID``. The run directories of earlier
starts are ``ID.1`` (the oldest), ``ID.2``, ...
"""

from __future__ import annotations

import errno
import itertools
import os
import shlex
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from holdfast.errors import UsageError
from holdfast.runtime.node.file_owners import doubt, is_ours
from holdfast.runtime.node.run_processes import processes
from holdfast.runtime.node.run_settings import SETTINGS_FILE, RunSettings
from holdfast.runtime.node.rundir import ATTEMPT_NAME, RunDir, is_free

POLL_S = 0.1
AFTER_GRACE_S = 60.0  # added to the grace time, for saves in flight


def put_aside(run: RunDir, waiting: Callable[[], None]) -> Path | None:
    """Rename the run directory and the logs of the previous start of this run, which has ended.

    In the directory of ``--log-dir``, only the directories of attempts are moved.

    Args:
        waiting: called once if this function has to wait: the previous start has lost its launcher, and its processes
            still save and leave.

    Returns:
        The new path of the run directory; None if there was no previous start.

    Raises:
        UsageError: the previous start still runs, or another user may have made the directory.
        OSError: the directory cannot be moved.
    """
    if not (run.path / SETTINGS_FILE).is_file():
        return None
    why = doubt(run.path)
    if why:
        raise UsageError(
            f"{run.path} {why}: a run that another user could have prepared is not touched",
            hint="choose another --run-id, or another place with --run-dir",
        )
    settings = RunSettings.load(run.path)
    _await_end(run, settings.grace_s + AFTER_GRACE_S, waiting)
    run.remove_pages()
    number = next(n for n in itertools.count(1) if not _numbered(run.path, n).exists())
    logs = Path(settings.log_dir)
    if logs.name == run.path.name:  # the settings file may name any directory
        aside = _numbered(logs, number)
        _move(_attempts(logs), aside)
        _rewrite(run.path, msgspec.structs.replace(settings, log_dir=str(aside)))
    return run.path.rename(_numbered(run.path, number))


def bring_checkpoints(run: RunDir, aside: Path) -> bool:
    """Move the checkpoints in ``aside``, the run directory of an earlier start, to the new run directory of this run.

    The new start resumes from these checkpoints. Checkpoints are in a run directory only if the script names no other
    directory. Return False if ``aside`` has no checkpoints.
    """
    old = RunDir(aside).checkpoints
    if not old.is_dir() or old.is_symlink():  # with several nodes they are beside the run directory
        return False
    old.rename(run.checkpoints)
    return True


def _await_end(run: RunDir, bound_s: float, waiting: Callable[[], None]) -> None:
    until_s = time.monotonic() + bound_s
    warned, name = False, shlex.quote(str(run.path))
    while not is_free(run.launcher_lock) or not is_free(run.agent_lock) or any(processes(run)):
        if not is_free(run.launcher_lock) or time.monotonic() > until_s:
            raise UsageError(
                f"run {run.path.name} still has processes, and they use {run.path}",
                hint=f"holdfast status {name}; to let it save and leave: holdfast exit {name}",
            )
        if not warned:
            warned = True
            waiting()
        time.sleep(POLL_S)


def _attempts(logs: Path) -> list[Path]:
    """Return the directories ``attempt-NNN`` of this user in ``logs``, which may also have files of others."""
    if not logs.is_dir() or not is_ours(logs):
        return []
    named = (path for path in logs.iterdir() if ATTEMPT_NAME.fullmatch(path.name))
    return sorted(path for path in named if path.is_dir() and is_ours(path))


def _move(found: Sequence[Path], aside: Path) -> None:
    """Move the directories ``found`` into ``aside``. Raises: OSError: ``aside`` is not a directory of this user."""
    if not found:
        return
    aside.mkdir(mode=0o700, exist_ok=True)
    if not is_ours(aside):
        raise PermissionError(errno.EPERM, f"{aside} is a link, or belongs to another user")
    for path in found:
        path.rename(aside / path.name)


def _numbered(path: Path, number: int) -> Path:
    return path.with_name(f"{path.name}.{number}")


def _rewrite(run_dir: Path, settings: RunSettings) -> None:
    """Save changed settings of an old run, with the old times of the settings file, which show the age of the run."""
    path = run_dir / SETTINGS_FILE
    times = path.stat()
    settings.save(run_dir)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
