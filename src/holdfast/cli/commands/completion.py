"""Scripts with which a shell completes ``holdfast``: of click for bash, zsh and fish, a static one for tcsh."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import click
from click.shell_completion import CompletionItem, get_completion_class

from holdfast.cli.screen.escaping import echo
from holdfast.cli.start.flags import FLAGS
from holdfast.errors import HoldfastError, UsageError

if TYPE_CHECKING:
    from holdfast.runtime.node.run_settings import RunSettings
    from holdfast.runtime.node.rundir import RunDir

PROGRAM = "holdfast"
VARIABLE = "_HOLDFAST_COMPLETE"  # click's own name for it
SHELLS = ("bash", "zsh", "fish", "tcsh")


def script_for(shell: str) -> str:
    """What ``shell`` reads to complete commands, flags and the script of ``holdfast run``.

    Raises:
        UsageError: another shell.
    """
    from holdfast.cli.main import COMMANDS, cli  # it loads this module by the name of a command

    if shell not in SHELLS:
        raise UsageError(
            f"{shell}: no such shell is known; supported are {', '.join(SHELLS)}",
            hint="holdfast completion bash > ~/.local/share/bash-completion/completions/holdfast",
        )
    if shell == "tcsh":
        flags = " ".join(flag.name.removeprefix("--") for flag in FLAGS)
        return f"complete {PROGRAM} 'p/1/({' '.join(COMMANDS)})/' 'c/--/({flags})/' 'n/*/f/'"
    made = get_completion_class(shell)
    assert made is not None, "click knows these three"
    return made(cli, {}, PROGRAM, VARIABLE).source()


def files(ctx: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Names of files, by the shell itself."""
    return [CompletionItem(incomplete, type="file")]


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("shell", metavar="|".join(SHELLS))
def completion(shell: str) -> int:
    """Print what a shell reads to complete commands, flags, scripts and runs.

    For bash, in ~/.bashrc: eval "$(holdfast completion bash)"; zsh in ~/.zshrc alike. For fish: holdfast completion
    fish > ~/.config/fish/completions/holdfast.fish
    """
    echo(script_for(shell))
    return 0


def run_names(ctx: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Runs that begin so, newest first; where there is none, files."""
    from holdfast.cli.screen.run_lookup import RUNS, runs_below

    base = Path(str(ctx.params.get("run_dir") or RUNS))
    return _begun((path.name for path in runs_below(base)), incomplete) or files(ctx, parameter, incomplete)


def ranks(ctx: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """The ranks of the run that is named before, else of the newest one."""
    try:
        _, settings = _run_of(ctx)
    except HoldfastError:
        return []
    return _begun(map(str, range(settings.workers)), incomplete)


def attempts(ctx: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """The attempts of that run that have logs."""
    from holdfast.cli.screen.log_tail import attempts as numbers
    from holdfast.cli.screen.run_view import Watch

    try:
        log_dir = Watch(*_run_of(ctx)).log_dir
    except HoldfastError:
        return []
    return _begun(map(str, numbers(log_dir)), incomplete)


def checkpoints(ctx: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Below a root: its checkpoints, newest first, or their steps after ``ROOT@``; elsewhere files."""
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
    """The run that stands on the line. Raises: UsageError."""
    from holdfast.cli.screen.run_lookup import RUNS, find_run

    left = iter(ctx.args)  # click stops at an option without its value, and sorts nothing then
    return find_run(ctx.params.get("run") or next(left, None), str(ctx.params.get("run_dir") or RUNS))


def _attempts_in(root: Path) -> list[tuple[int, str]]:
    """(step, name) of each attempt, newest first; whether they are valid is not looked at."""
    from holdfast.store.format.manifest import attempt_key

    try:
        names = os.listdir(root)
    except OSError:
        return []
    keyed = [(key, name) for name in names if (key := attempt_key(name))]
    return [(key[0], name) for key, name in sorted(keyed, reverse=True)]


def _begun(words: Iterable[str], incomplete: str) -> list[CompletionItem]:
    return [CompletionItem(word) for word in words if word.startswith(incomplete)]
