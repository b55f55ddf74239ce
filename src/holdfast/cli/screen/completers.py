"""The words that a shell can complete on a command line of ``holdfast``: files, runs, ranks, attempts, checkpoints."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import click
from click.shell_completion import CompletionItem

from holdfast.errors import HoldfastError

if TYPE_CHECKING:
    from holdfast.runtime.node.run_settings import RunSettings
    from holdfast.runtime.node.rundir import RunDir


def files(ctx: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Return the request that the shell itself completes file names."""
    return [CompletionItem(incomplete, type="file")]


def run_names(ctx: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Return runs whose names begin with ``incomplete``, newest first; without a match, a request for file names."""
    from holdfast.cli.screen.run_lookup import RUNS, runs_below

    base = Path(str(ctx.params.get("run_dir") or RUNS))
    return _begun((path.name for path in runs_below(base)), incomplete) or files(ctx, parameter, incomplete)


def ranks(ctx: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Return the matching ranks of the run that is named earlier on the line, or of the newest run."""
    try:
        _, settings = _run_of(ctx)
    except HoldfastError:
        return []
    return _begun(map(str, range(settings.workers)), incomplete)


def attempts(ctx: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Return the matching numbers of worker starts that have logs, of the run on the line or of the newest run."""
    from holdfast.cli.screen.log_tail import attempts as numbers
    from holdfast.cli.screen.run_view import Watch

    try:
        log_dir = Watch(*_run_of(ctx)).log_dir
    except HoldfastError:
        return []
    return _begun(map(str, numbers(log_dir)), incomplete)


def checkpoints(ctx: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Return checkpoints below a root, newest first, or their steps after ``ROOT@``; otherwise a request for files."""
    root, at, _ = incomplete.rpartition("@")
    parent = root if at else incomplete.rpartition("/")[0]
    newest_first = _attempts_in(Path(parent or "."))
    if at:
        return _begun(
            (f"{root}@{step}" for step in dict.fromkeys(step for step, _ in newest_first)), incomplete
        )
    found = _begun((f"{parent}/{name}" if parent else name for _, name in newest_first), incomplete)
    return found or files(ctx, parameter, incomplete)


def _run_of(ctx: click.Context) -> tuple[RunDir, RunSettings]:
    """Return the run that is named on the line. Raises: UsageError."""
    from holdfast.cli.screen.run_lookup import RUNS, find_run

    left = iter(ctx.args)  # at an option without its value click stops, and leaves all words here
    return find_run(ctx.params.get("run") or next(left, None), str(ctx.params.get("run_dir") or RUNS))


def _attempts_in(root: Path) -> list[tuple[int, str]]:
    """Return (step, name) of each attempt, newest first, valid or not."""
    from holdfast.store.format.manifest import attempt_key

    try:
        names = os.listdir(root)
    except OSError:
        return []
    keyed = [(key, name) for name in names if (key := attempt_key(name))]
    return [(key[0], name) for key, name in sorted(keyed, reverse=True)]


def _begun(words: Iterable[str], incomplete: str) -> list[CompletionItem]:
    return [CompletionItem(word) for word in words if word.startswith(incomplete)]
