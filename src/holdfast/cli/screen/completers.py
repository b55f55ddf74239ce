"""Shell completion of the arguments of ``holdfast``: files, runs, ranks, attempts (worker starts), checkpoints."""

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
    """Return one item that asks the shell to complete file names itself."""
    return [CompletionItem(incomplete, type="file")]


def run_names(ctx: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Return the runs whose names begin with ``incomplete``, newest first.

    If there are none, ask the shell to complete file names.
    """
    from holdfast.cli.screen.run_lookup import RUNS, runs_below

    base = Path(str(ctx.params.get("run_dir") or RUNS))
    return _begun((path.name for path in runs_below(base)), incomplete) or files(ctx, parameter, incomplete)


def ranks(ctx: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Return the ranks whose numbers begin with ``incomplete``.

    They belong to the run that is named on the command line, or to the newest run.
    """
    try:
        _, settings = _run_of(ctx)
    except HoldfastError:
        return []
    return _begun(map(str, range(settings.workers)), incomplete)


def attempts(ctx: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Return the attempts (numbers of starts of all workers) that have logs and begin with ``incomplete``.

    They belong to the run that is named on the command line, or to the newest run.
    """
    from holdfast.cli.screen.log_tail import attempts as numbers
    from holdfast.cli.screen.run_view import Watch

    try:
        log_dir = Watch(*_run_of(ctx)).log_dir
    except HoldfastError:
        return []
    return _begun(map(str, numbers(log_dir)), incomplete)


def checkpoints(ctx: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Return the paths of checkpoints that begin with ``incomplete``, the word that the user has typed so far.

    They are ordered from newest to oldest. If the word is ``ROOT@``, return the steps of the checkpoints in ROOT. If no
    path begins with the word, ask the shell to complete file names.
    """
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
    """Return the run that is named on the command line, or the newest run. Raises: UsageError."""
    from holdfast.cli.screen.run_lookup import RUNS, find_run

    left = iter(ctx.args)  # at an option without its value click stops, and puts the other words here
    return find_run(ctx.params.get("run") or next(left, None), str(ctx.params.get("run_dir") or RUNS))


def _attempts_in(root: Path) -> list[tuple[int, str]]:
    """Return (step, name) of each checkpoint directory below ``root``, newest first, whether valid or not."""
    from holdfast.store.format.manifest import attempt_key

    try:
        names = os.listdir(root)
    except OSError:
        return []
    keyed = [(key, name) for name in names if (key := attempt_key(name))]
    return [(key[0], name) for key, name in sorted(keyed, reverse=True)]


def _begun(words: Iterable[str], incomplete: str) -> list[CompletionItem]:
    return [CompletionItem(word) for word in words if word.startswith(incomplete)]
