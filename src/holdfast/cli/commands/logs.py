"""The command ``holdfast logs``, which prints the output of a run's ranks on this node, over all starts of workers."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import click

from holdfast.cli.screen.completers import attempts as attempts_of_run
from holdfast.cli.screen.completers import ranks as ranks_of_run
from holdfast.cli.screen.console import marked
from holdfast.cli.screen.escaping import echo, echo_line
from holdfast.cli.screen.log_tail import FileTail, LogTail, attempts, ranks_of
from holdfast.cli.screen.run_lookup import find_run, name_of, run_argument
from holdfast.cli.screen.run_view import Watch
from holdfast.errors import UsageError
from holdfast.runtime.node.rundir import log_path

FOLLOW_POLL_S = 0.2


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@run_argument
@click.option(
    "--rank",
    type=int,
    shell_complete=ranks_of_run,
    help="Only this rank of the job (default: all, each line marked).",
)
@click.option(
    "--attempt",
    type=int,
    shell_complete=attempts_of_run,
    help="Only this attempt (default: all; each restart is one).",
)
@click.option("--follow", "-f", is_flag=True, help="Print new lines until the run is over.")
@click.option("--raw", is_flag=True, help="With every control character that a rank printed, as it is.")
@click.option("--paths", is_flag=True, help="Print the paths of the logs instead.")
def logs(
    run: str | None, run_dir: str, rank: int | None, attempt: int | None, follow: bool, raw: bool, paths: bool
) -> int:
    """Print the output of the ranks of RUN (an id, a path, or the newest).

    Logs are plain files on the node where a rank ran: one file per rank and attempt (start of all workers). `--paths`
    prints their names. Control characters are shown as escapes, except those for colours.
    """
    directory, settings = find_run(run, run_dir)
    watch = Watch(directory, settings)
    log_dir = watch.log_dir
    ranks = settings.workers
    if rank is not None and not 0 <= rank < ranks:
        raise UsageError(f"run {settings.run_id} has ranks 0 to {ranks - 1}, not {rank}",
                         hint=f"holdfast status {name_of(directory.path)}")  # fmt: skip
    _check_attempt(watch, attempt, follow)
    if rank is not None:
        _check_place(watch, rank, attempt)
    if paths:
        for path in _paths(log_dir, rank, attempt):
            echo(str(path))
        return 0
    several = rank is None and ranks > 1
    tail = LogTail(log_dir, lambda _, each: rank in (None, each))
    for number, line in _follow(watch, tail) if follow else _read(log_dir, rank, attempt):
        echo_line(marked(number, line) if several else line, raw=raw)
    return 0


def _check_attempt(watch: Watch, attempt: int | None, follow: bool) -> None:
    if attempt is None:
        return
    if follow:
        raise UsageError("--attempt shows what is over, --follow what comes", hint="leave one of them out")
    known = attempts(watch.log_dir)
    if attempt not in known:
        raise UsageError(
            f"run {watch.settings.run_id} has no attempt {attempt} "
            f"({f'the last one is {known[-1]}' if known else 'no worker was started yet'})",
            hint=f"holdfast logs {name_of(watch.directory.path)} --paths",
        )


def _check_place(watch: Watch, rank: int, attempt: int | None) -> None:
    """Refuse a rank that has run only on other nodes, because its log is not on this node. Raises: UsageError."""
    if any(_paths(watch.log_dir, rank, attempt)):
        return
    places = watch.read().places
    nodes = sorted(
        {
            node
            for (at, who), seats in places.items()
            if who == rank and attempt in (None, at)
            for node in seats
        }
    )
    if nodes and watch.settings.node not in nodes:
        raise UsageError(
            f"rank {rank} ran on {', '.join(nodes)}: its log is there, not on {watch.settings.node}",
            hint=f"on {nodes[-1]}: holdfast logs RUN --rank {rank}",
        )
    if attempt is not None and places and not nodes:
        raise UsageError(
            f"attempt {attempt} had no rank {rank}: it was of fewer nodes",
            hint=f"holdfast logs {name_of(watch.directory.path)} --paths",
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
        # The end is tested before the files are read, so that all output from before the end is shown.
        over = watch.over
        yield from tail.poll()
        if over:
            yield from tail.drain()
            return
        time.sleep(FOLLOW_POLL_S)
