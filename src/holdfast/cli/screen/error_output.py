"""Conversion of an exception into a message for the user and an exit code. All commands use this module.

The message goes to stderr and has this form::

    error: the problem and its place
      after: progress, time and cost  (of a run)
      log: path                       (when a run or a traceback file exists)
      next: the command or change to try
"""

from __future__ import annotations

import os
import sys
import tempfile
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from holdfast.cli.screen.escaping import echo, shown
from holdfast.errors import (
    HINTS_OF_THE_MACHINE,
    AuthError,
    HoldfastError,
    InternalError,
    NotMet,
    StoreError,
    UsageError,
    UserError,
)
from holdfast.exit_codes import Exit
from holdfast.runtime.node.secret_masking import masked
from holdfast.text import closest

_LOG = "log: "
_NOTHING_SAID: Any = getattr(
    click.exceptions, "NoArgsIsHelpError", ()
)  # since click 8.2; older versions print the help


@contextmanager
def logs_at(path: Path | str) -> Iterator[None]:
    """Add ``path``, where the user finds details, to each error that leaves the ``with`` body.

    An error that already has such a path keeps it.
    """
    try:
        yield
    except HoldfastError as error:
        if not getattr(error, "__notes__", ()):
            error.add_note(f"{_LOG}{path}")
        raise


def exit_code(error: HoldfastError) -> Exit:
    """Return the exit code (docs/exit-codes.md) of a command that ended with ``error``."""
    if isinstance(error, UsageError):
        return Exit.USAGE
    if isinstance(error, NotMet):
        return Exit.UNMET
    if isinstance(error, UserError | StoreError | AuthError):
        return Exit.BAD_INPUT
    return Exit.INTERNAL if isinstance(error, InternalError) else Exit.FAILED


def no_colour() -> bool:
    """Return True if the variable ``NO_COLOR`` is set and not empty (https://no-color.org)."""
    return bool(os.environ.get("NO_COLOR"))


def say(text: str, *, colour: str = "", lead: str = "") -> None:
    """Print one message on stderr.

    ``lead`` is printed before the text, and in ``colour`` if stderr is a terminal.
    """
    if lead and sys.stderr.isatty() and not no_colour():
        lead = click.style(lead, fg=colour, bold=True)
    echo(text, lead=lead, err=True)


def outcome(message: str, log: str, hint: str, report: str = "", after: str = "") -> None:
    """Print a failure on stderr. Empty parts are left out.

    Args:
        message: the problem and its place.
        log: path with details.
        hint: the command or change to try.
        report: path of the report on the fault that ended the run.
        after: progress, time and cost of the run.
    """
    say(message, colour="red", lead="error: ")
    if after:
        say(f"  after: {after}")
    if log:
        say(f"  {_LOG}{log}")
    if report:
        say(f"  report: {report}")
    if hint:
        say(f"  next: {hint}")


def show(error: HoldfastError) -> Exit:
    """Print an error of Holdfast on stderr, and return its exit code."""
    logs = [note.removeprefix(_LOG) for note in getattr(error, "__notes__", ()) if note.startswith(_LOG)]
    outcome(error.message, logs[0] if logs else "", error.hint)
    return exit_code(error)


def show_unexpected(error: BaseException) -> Exit:
    """Print an unexpected exception on stderr, and return its exit code.

    Its traceback is written to a file that only the user can read. The message names that file.
    """
    text = f"{type(error).__name__}: {error}"
    internal = InternalError(f"this is a defect of Holdfast: {text}", hint="report it with the file above")
    try:
        fd, path = tempfile.mkstemp(prefix="holdfast-error-", suffix=".txt")
        with os.fdopen(fd, "w", errors="backslashreplace") as file:
            file.write(f"command: {masked(sys.argv)}\npython: {sys.version}\n\n")
            file.write(shown("".join(traceback.format_exception(error))))
    except OSError:  # the file cannot be written
        echo("".join(traceback.format_exception(error)), nl=False, err=True)
    else:
        internal.add_note(f"{_LOG}{path}")
    return show(internal)


def of_the_machine(error: OSError) -> UserError | None:
    """Convert an ``OSError`` that the machine caused (permission, disk space, descriptors) to a ``UserError``.

    Return None if the error must be a defect of Holdfast.
    """
    hint = HINTS_OF_THE_MACHINE.get(error.errno or 0)
    if hint is None:
        return None
    where = f"{error.filename}: " if error.filename else ""
    return UserError(f"{where}{error.strerror}", hint=hint)


def working_directory() -> None:
    """Check that the working directory exists and can be used. Raises: UsageError."""
    try:
        os.getcwd()
    except OSError as error:
        raise UsageError(
            f"the working directory cannot be used: {error.strerror}", hint="cd to a directory that exists"
        ) from error


def translate(error: click.ClickException) -> UsageError:
    """Return click's error about a command line as a ``UsageError``. For an unknown flag, suggest a similar one."""
    context = getattr(error, "ctx", None)
    path = context.command_path if context is not None else "holdfast"
    hint = f"{path} --help"
    if isinstance(error, _NOTHING_SAID) and context is not None and isinstance(context.command, click.Group):
        commands = ", ".join(context.command.list_commands(context))
        return UsageError(f"{path} needs a command: {commands}", hint=hint)
    if isinstance(error, click.NoSuchOption):
        # The suggestion has dashes, also for a flag that was given with underscores.
        close = closest(error.option_name.replace("_", "-"), _options(context))
        found = f"; did you mean {close}?" if close else ""
        if path.endswith((" run", " drill")):
            hint += "  (arguments of your script go after the script)"
        return UsageError(f"{path} has no flag {error.option_name}{found}", hint=hint)
    return UsageError(error.format_message(), hint=hint)


def _options(context: click.Context | None) -> list[str]:
    if context is None:
        return []
    return [
        name
        for parameter in context.command.get_params(context)
        for name in parameter.opts
        if name.startswith("--") and "_" not in name
    ]
