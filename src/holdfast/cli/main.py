"""The command ``holdfast``, which imports the module of a subcommand only when the subcommand is used.

The texts of ``holdfast --help`` are in this module. The help therefore needs no import of a subcommand.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

import click

from holdfast.cli.screen.checked_output import OutputLost, flush, watch
from holdfast.cli.screen.error_output import (
    no_colour,
    of_the_machine,
    show,
    show_unexpected,
    translate,
    working_directory,
)
from holdfast.cli.screen.escaping import echo
from holdfast.errors import HoldfastError
from holdfast.exit_codes import Exit
from holdfast.text import closest

GROUPS: dict[str, dict[str, tuple[str, str]]] = {
    "Train": {
        "run": (
            "holdfast.cli.commands.run:run",
            "Start a training script on one host or more, and keep it alive.",
        ),
        "submit": ("holdfast.cli.commands.submit:submit", "Start a script on a cluster: Slurm, Kubernetes."),
        "drill": (
            "holdfast.cli.commands.drill:drill",
            "Train, inject faults, compare with the undisturbed run bit for bit.",
        ),
        "drain": (
            "holdfast.cli.commands.drain:drain",
            "Move the ranks of a node elsewhere, and let the node leave.",
        ),
        "exit": ("holdfast.cli.commands.exit:exit_run", "Ask a run to save at the next step and leave."),
    },
    "Look": {
        "ls": ("holdfast.cli.commands.ls:list_runs", "The runs of a directory, newest first."),
        "status": (
            "holdfast.cli.commands.status:status",
            "What a run does now: ranks, phases, steps, faults.",
        ),
        "logs": ("holdfast.cli.commands.logs:logs", "What the ranks of a run printed."),
        "report": (
            "holdfast.cli.commands.report:report",
            "What happened: each fault with its evidence, cost and next step.",
        ),
        "stacks": ("holdfast.cli.commands.stacks:stacks", "Where every rank of a run is now."),
    },
    "Keep": {
        "ckpt": (
            "holdfast.cli.commands.ckpt:ckpt",
            "List, verify, repair, merge, convert and prune checkpoints.",
        ),
        "gc": (
            "holdfast.cli.commands.gc:gc",
            "Remove the directories of ended runs that hold no checkpoints.",
        ),
    },
    "Prepare": {
        "doctor": (
            "holdfast.cli.commands.doctor:doctor",
            "Is this machine fit for a run, and what would a loss cost.",
        ),
        "ranktable": ("holdfast.cli.commands.ranktable:ranktable", "Check a rank table, or write one."),
        "compat": ("holdfast.cli.commands.compat:compat", "The packages mindio_ttp and taskd over Holdfast."),
        "sim": (
            "holdfast.cli.commands.sim:sim",
            "The recovery protocol against random faults, simulated and checked.",
        ),
    },
    "Shell": {
        "help": ("holdfast.cli.start.help_pages:help_on", "The help of a command."),
        "completion": (
            "holdfast.cli.commands.completion:completion",
            "What a shell reads to complete commands and flags.",
        ),
    },
}
COMMANDS: dict[str, tuple[str, str]] = {
    name: command for group in GROUPS.values() for name, command in group.items()
}


class LazyGroup(click.Group):
    """A command group that imports each command only when it is used."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module, _, name = COMMANDS[cmd_name][0].partition(":")
        command: click.Command = getattr(importlib.import_module(module), name)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        if name not in COMMANDS and not name.startswith("-"):
            close = closest(name, list(COMMANDS))
            found = f"; did you mean {close}?" if close else ""
            script = f"  (to start a script: holdfast run {name})" if name.endswith(".py") else ""
            raise click.UsageError(f"holdfast has no command {name}{found}{script}", ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for title, commands in GROUPS.items():
            with formatter.section(title):
                formatter.write_dl([(name, text) for name, (_, text) in commands.items()])


def _print_version(ctx: click.Context, _parameter: click.Parameter, value: bool) -> None:
    if value and not ctx.resilient_parsing:
        from importlib.metadata import version

        echo(f"holdfast {version('holdfast')}")
        ctx.exit()


@click.command(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.option("-V", "--version", is_flag=True, is_eager=True, expose_value=False, callback=_print_version,
              help="Print the version.")  # fmt: skip
def cli() -> None:
    """Keeps distributed training jobs alive: no committed step lost, the same bits at the end.

    Start with `holdfast drill`, then replace `torchrun` by `holdfast run`. Help for one command: holdfast help COMMAND.
    """


def answer(argv: Sequence[str] | None = None) -> int:
    """Run a command line and return its exit code.

    Args:
        argv: the words after ``holdfast``; None means those of this process.
    """
    try:
        try:
            return _answer(list(sys.argv[1:] if argv is None else argv) or ["--help"])
        finally:
            flush()
    except OutputLost as lost:
        return lost.answer()


def _answer(args: list[str]) -> int:
    """Run a command line and return its exit code. Raises: OutputLost, if stdout takes no output."""
    try:
        working_directory()
        colour = False if no_colour() else None
        code = cli.main(args=args, prog_name="holdfast", standalone_mode=False, color=colour)
    except click.ClickException as error:
        return show(translate(error))
    except HoldfastError as error:
        return show(error)
    except (click.Abort, KeyboardInterrupt):
        return Exit.INTERRUPTED
    except OutputLost:
        raise
    except OSError as error:
        refused = of_the_machine(error)
        return show_unexpected(error) if refused is None else show(refused)
    except Exception as error:
        return show_unexpected(error)
    return code if isinstance(code, int) else Exit.OK


def main(argv: Sequence[str] | None = None) -> None:
    """Run a command line, and exit with its code. This is the entry point ``holdfast``.

    If ``argv`` is None, the command line is that of this process.
    """
    watch()
    sys.exit(answer(argv))
