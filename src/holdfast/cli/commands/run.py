"""The command ``holdfast run``, which starts a job that survives faults. Its command line is that of torchrun."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from holdfast.cli.commands.completion import script_for
from holdfast.cli.screen.completers import files
from holdfast.cli.screen.escaping import echo
from holdfast.cli.start.finite_number import FiniteNumber
from holdfast.cli.start.flag_files import explanation, settle
from holdfast.cli.start.flags import FLAGS
from holdfast.cli.start.help_pages import RunCommand
from holdfast.cli.start.node_flags import RUN_HELP
from holdfast.cli.start.run_config import resolve
from holdfast.cli.start.scheduler_flags import scheduled, share_token
from holdfast.cli.start.script_arguments import without_separator
from holdfast.cli.start.torchrun_fallback import give_way
from holdfast.errors import AuthError, UsageError, UserError
from holdfast.runtime.node.disabled import is_disabled

TYPES: dict[str, Any] = {"text": str, "whole": int, "number": FiniteNumber()}


def _options(command: click.Command) -> click.Command:
    for flag in FLAGS:
        if flag.kind == "switch":
            option = click.Option([*flag.spellings], is_flag=True, default=False, envvar=flag.variable)
        else:
            option = click.Option(
                [*flag.spellings], type=TYPES[flag.kind], default=flag.default, envvar=flag.variable
            )
        command.params.append(option)
    return command


@_options
@click.command(
    cls=RunCommand,
    # The first positional argument ends the flags of Holdfast: all words after it belong to the script, even --nnodes.
    context_settings={"allow_interspersed_args": False, "help_option_names": ["-h", "--help"]},
)
@click.argument("script", required=False, metavar="SCRIPT", shell_complete=files)
@click.argument("args", nargs=-1, metavar="[ARGS]...", type=click.UNPROCESSED, callback=without_separator)
@click.pass_context
def run(ctx: click.Context, /, script: str | None, args: tuple[str, ...], **values: Any) -> int:
    """Start SCRIPT with ARGS on this machine, as torchrun would, and keep it alive.

    The flags are those of torchrun, in both spellings, and torchrun's variables PET_* also set them. A worker that dies
    is replaced automatically, and training continues. Ctrl-C saves at the next step and leaves; a second Ctrl-C ends at
    once.
    """
    if values["print_completion"]:
        echo(script_for(values["print_completion"]))
        return 0
    settled = scheduled(settle(ctx, values, Path.cwd()), os.environ)
    if settled.values["explain"]:
        from holdfast.cli.screen.console import print_table  # loads rich

        print_table(("flag", "value", "from"), explanation(settled))
        return 0
    if script is None:
        raise UsageError("no training script given", hint=f"holdfast run train.py  (flags: {RUN_HELP})")
    if is_disabled():
        give_way(settled, script, args)
    try:
        share_token(settled)
        request = resolve(settled.values, settled.given, script, args)
    except (
        UserError,
        AuthError,
    ) as error:  # any such error means a wrong command line, and nothing was started
        raise UsageError(error.message, hint=error.hint) from error
    from holdfast.cli.start.launcher import launch  # loads rich: not for a command line that is refused

    return launch(replace(request, notes=(*settled.notes, *request.notes)))
