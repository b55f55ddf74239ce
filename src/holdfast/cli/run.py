"""``holdfast run``: torchrun's command line, and a job that survives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click
from click.core import ParameterSource

from holdfast.cli.completion import files, script_for
from holdfast.cli.escaping import echo
from holdfast.cli.finite import Finite
from holdfast.cli.flags import FLAGS, Flag
from holdfast.cli.nodes import RUN_HELP
from holdfast.cli.resolve import resolve
from holdfast.errors import AuthError, UsageError, UserError

_TYPES: dict[str, Any] = {"text": str, "whole": int, "number": Finite()}
_SECTIONS: tuple[tuple[str, Callable[[Flag], bool]], ...] = (
    ("Holdfast's own", lambda f: f.ours),
    ("As in torchrun", lambda f: f.use == "used" and not f.ours),
    ("Accepted without effect", lambda f: f.use == "no effect"),
    ("Refused by name", lambda f: f.use == "refused"),
)


class RunCommand(click.Command):
    """Help in sections; the list itself is ``cli/flags.py``."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for title, belongs in _SECTIONS:
            with formatter.section(title):
                formatter.write_dl([_help_row(flag) for flag in FLAGS if belongs(flag)])


def _help_row(flag: Flag) -> tuple[str, str]:
    names = f"{flag.short}, {flag.name}" if flag.short else flag.name
    shown = "" if flag.default in (None, False, "") else f"  [{flag.default}]"
    return names if flag.kind == "switch" else f"{names} {flag.kind.upper()}", flag.about + shown


def _options(command: click.Command) -> click.Command:
    for flag in FLAGS:
        if flag.kind == "switch":
            option = click.Option([*flag.spellings], is_flag=True, default=False, envvar=flag.variable)
        else:
            option = click.Option(
                [*flag.spellings], type=_TYPES[flag.kind], default=flag.default, envvar=flag.variable
            )
        command.params.append(option)
    return command


@_options
@click.command(
    cls=RunCommand,
    # The first positional argument ends our flags: whatever follows belongs to the script, even --nnodes.
    context_settings={"allow_interspersed_args": False, "help_option_names": ["-h", "--help"]},
)
@click.argument("script", required=False, shell_complete=files)
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
@click.pass_context
def run(ctx: click.Context, /, script: str | None, args: tuple[str, ...], **values: Any) -> int:
    """Start SCRIPT with ARGS on this machine, as torchrun would, and keep it alive.

    Flags are torchrun's, in both spellings; PET_* variables work. A worker that dies is replaced and training goes on
    by itself. Ctrl-C saves at the next step and leaves; a second Ctrl-C ends at once.
    """
    if values["print_completion"]:
        echo(script_for(values["print_completion"]))
        return 0
    if script is None:
        raise UsageError("no training script given", hint=f"holdfast run train.py  (flags: {RUN_HELP})")
    sources = (ParameterSource.COMMANDLINE, ParameterSource.ENVIRONMENT)
    given = frozenset(key for key in values if ctx.get_parameter_source(key) in sources)
    try:
        request = resolve(values, given, script, args)
    except (
        UserError,
        AuthError,
    ) as error:  # of whatever kind: the command line is wrong, and nothing was started
        raise UsageError(error.message, hint=error.hint) from error
    from holdfast.cli.launcher import launch  # loads rich: not for a command line that is refused

    return launch(request)
