"""The one place that turns an exception into a message for the user and an exit code for the shell.

Form, always on stderr::

    error: what was wrong and where
      after: how far it came          (of a run)
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
)  # of click 8.2; older versions print the help


@contextmanager
def logs_at(path: Path | str) -> Iterator[None]:
    """Add ``path``, as the place with more details, to errors that leave this block. An inner path has precedence."""
    try:
        yield
    except HoldfastError as error:
        if not getattr(error, "__notes__", ()):
            error.add_note(f"{_LOG}{path}")
        raise


def exit_code(error: HoldfastError) -> Exit:
    """Return the documented code of an error that ended a command."""
    if isinstance(error, UsageError):
        return Exit.USAGE
    if isinstance(error, NotMet):
        return Exit.UNMET
    if isinstance(error, UserError | StoreError | AuthError):
        return Exit.BAD_INPUT
    return Exit.INTERNAL if isinstance(error, InternalError) else Exit.FAILED


def no_colour() -> bool:
    """Return True if the user wants no colours (https://no-color.org)."""
    return bool(os.environ.get("NO_COLOR"))


def say(text: str, *, colour: str = "", lead: str = "") -> None:
    """Print one message on stderr; ``lead`` is coloured if stderr is a terminal."""
    if lead and sys.stderr.isatty() and not no_colour():
        lead = click.style(lead, fg=colour, bold=True)
    echo(text, lead=lead, err=True)


def outcome(message: str, log: str, hint: str, report: str = "", after: str = "") -> None:
    """Print a failure; empty parts are left out.

    Args:
        report: path of the report on the fault that ended the run.
        after: how far a run came.
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
    """Print a typed error and return its exit code."""
    logs = [note.removeprefix(_LOG) for note in getattr(error, "__notes__", ()) if note.startswith(_LOG)]
    outcome(error.message, logs[0] if logs else "", error.hint)
    return exit_code(error)


def show_unexpected(error: BaseException) -> Exit:
    """Print an unexpected exception, and return its exit code. Its traceback goes to a private file that is named."""
    text = f"{type(error).__name__}: {error}"
    internal = InternalError(f"this is a defect of Holdfast: {text}", hint="report it with the file above")
    try:
        fd, path = tempfile.mkstemp(prefix="holdfast-error-", suffix=".txt")
        with os.fdopen(fd, "w", errors="backslashreplace") as file:
            file.write(f"command: {masked(sys.argv)}\npython: {sys.version}\n\n")
            file.write(shown("".join(traceback.format_exception(error))))
    except OSError:  # no place for a file
        echo("".join(traceback.format_exception(error)), nl=False, err=True)
    else:
        internal.add_note(f"{_LOG}{path}")
    return show(internal)


def of_the_machine(error: OSError) -> UserError | None:
    """Return an error that the machine caused (permission, room, file descriptors); None: a defect of Holdfast."""
    hint = HINTS_OF_THE_MACHINE.get(error.errno or 0)
    if hint is None:
        return None
    where = f"{error.filename}: " if error.filename else ""
    return UserError(f"{where}{error.strerror}", hint=hint)


def working_directory() -> None:
    """Check that the working directory exists. Raises: UsageError."""
    try:
        os.getcwd()
    except OSError as error:
        raise UsageError(
            f"the working directory cannot be used: {error.strerror}", hint="cd to a directory that exists"
        ) from error


def translate(error: click.ClickException) -> UsageError:
    """Return an error of click about the command line as a UsageError, with a close flag as suggestion."""
    context = getattr(error, "ctx", None)
    path = context.command_path if context is not None else "holdfast"
    hint = f"{path} --help"
    if isinstance(error, _NOTHING_SAID) and context is not None and isinstance(context.command, click.Group):
        commands = ", ".join(context.command.list_commands(context))
        return UsageError(f"{path} needs a command: {commands}", hint=hint)
    if isinstance(error, click.NoSuchOption):
        # The eye sees no difference between the two spellings, so none is made here.
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
