"""``holdfast logs``: what the ranks of a run printed, over all attempts."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import click

from holdfast.cli.find import find_run, run_argument
from holdfast.cli.tail import FileTail, LogTail, attempts, ranks_of
from holdfast.cli.view import Watch
from holdfast.errors import UsageError
from holdfast.runtime.rundir import log_path
from holdfast.runtime.settings import RunSettings

FOLLOW_POLL_S = 0.2


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@run_argument
@click.option("--rank", type=int, help="Only this rank (default: all, each line marked).")
@click.option("--attempt", type=int, help="Only this attempt (default: all; each restart is one).")
@click.option("--follow", "-f", is_flag=True, help="Go on until the run is over.")
@click.option("--paths", is_flag=True, help="Print the paths of the logs instead.")
def logs(
    run: str | None, run_dir: str, rank: int | None, attempt: int | None, follow: bool, paths: bool
) -> int:
    """What the ranks of RUN (an id, a path, or the newest) printed.

    Logs are plain files, one per rank and attempt; `--paths` names them.
    """
    directory, settings = find_run(run, run_dir)
    watch = Watch(directory, settings)
    log_dir = watch.log_dir
    _check(log_dir, settings, rank, attempt, follow)
    if paths:
        for path in _paths(log_dir, rank, attempt):
            click.echo(path)
        return 0
    marked = rank is None and settings.nproc > 1
    chosen = None if rank is None else frozenset({rank})
    lines = _follow(watch, LogTail(log_dir, chosen)) if follow else _read(log_dir, rank, attempt)
    for number, line in lines:
        click.echo(f"[rank {number}] {line}" if marked else line)
    return 0


def _check(log_dir: Path, settings: RunSettings, rank: int | None, attempt: int | None, follow: bool) -> None:
    if rank is not None and not 0 <= rank < settings.nproc:
        raise UsageError(f"run {settings.run_id} has ranks 0 to {settings.nproc - 1}, not {rank}",
                         hint="holdfast status")  # fmt: skip
    known = attempts(log_dir)
    if attempt is not None and follow:
        raise UsageError("--attempt shows what is over, --follow what comes", hint="leave one of them out")
    if attempt is not None and attempt not in known:
        raise UsageError(
            f"run {settings.run_id} has no attempt {attempt} "
            f"({f'there are {known[0]} to {known[-1]}' if known else 'no worker was started yet'})",
            hint="holdfast logs --paths",
        )


def _paths(log_dir: Path, rank: int | None, attempt: int | None) -> Iterator[Path]:
    for number in attempts(log_dir) if attempt is None else [attempt]:
        for each in ranks_of(log_dir, number):
            if rank in (None, each):
                yield log_path(log_dir, number, each)


def _read(log_dir: Path, rank: int | None, attempt: int | None) -> Iterator[tuple[int, str]]:
    for path in _paths(log_dir, rank, attempt):
        number = int(path.stem.removeprefix("rank-"))
        for line in FileTail(path).drain():
            yield number, line


def _follow(watch: Watch, tail: LogTail) -> Iterator[tuple[int, str]]:
    while True:
        # Asked before the files are read: what was written before the end is shown.
        over = watch.over
        yield from tail.poll()
        if over:
            yield from tail.drain()
            return
        time.sleep(FOLLOW_POLL_S)
