"""Handling of a stdout or stderr that cannot take the output of a command.

Theory. click, rich and the interpreter each handle a failed write in their own way, and none with an exit code of
Holdfast. So the error is handled below them: the process writes through a raw stream that turns the first error into
:class:`OutputLost` and drops all later output.
"""

from __future__ import annotations

import io
import os
import sys
from typing import Any, TextIO

from holdfast.cli.screen.error_output import show
from holdfast.errors import NO_ROOM, UserError
from holdfast.exit_codes import Exit


class OutputLost(Exception):
    """A failed write to stdout. It is no ``OSError``, so that no code in between handles it as one."""

    def __init__(self, error: OSError) -> None:
        super().__init__(str(error))
        self.error = error

    def answer(self) -> Exit:
        """Print the error, and return the exit code.

        A closed pipe is no error for ``head``, so nothing is printed for it.
        """
        if isinstance(self.error, BrokenPipeError):
            return Exit.PIPE
        return show(
            UserError(
                f"cannot write the output: {self.error.strerror or self.error}",
                hint="send it elsewhere, or free some space",
            )
        )


class _Raw(io.FileIO):
    """A file descriptor that raises for the first failed write, and drops all later output."""

    def __init__(self, fd: int, *, silent: bool) -> None:
        super().__init__(fd, "wb", closefd=False)
        self.drops_for_room = False
        self._silent = silent
        self._lost = False

    def write(self, data: Any) -> Any:
        """Write ``data``, and return the number of bytes taken. Raises: OutputLost: the first failed write."""
        try:
            return len(data) if self._lost else super().write(data)
        except OSError as error:
            if self.drops_for_room and error.errno in NO_ROOM:
                return len(data)
            self._lost = True
            if self._silent:
                return len(data)
            raise OutputLost(error) from error


def watch() -> None:
    """Replace stdout and stderr by streams that report lost output; the loss of stderr itself cannot be reported.

    A closed stream (``>&-``) becomes the null device. Otherwise the next opened file would get its number.
    """
    for fd in range(3):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest number that is free
    sys.stdout = sys.stdout or open(1, "w", closefd=False)
    sys.stderr = sys.stderr or open(2, "w", closefd=False)
    sys.stdout, sys.stderr = _watched(sys.stdout, silent=False), _watched(sys.stderr, silent=True)


def _watched(stream: TextIO, *, silent: bool) -> TextIO:
    if not isinstance(stream, io.TextIOWrapper):  # closed, or replaced by another program
        return stream
    stream.flush()
    return io.TextIOWrapper(
        io.BufferedWriter(_Raw(stream.fileno(), silent=silent)),
        encoding=stream.encoding,
        errors="backslashreplace",  # a rank's output or a file name may not be in this terminal's encoding
        line_buffering=stream.line_buffering or stream.write_through,
    )


def outlive_full_disk() -> None:
    """Drop output without room from now on: a job does not end because the file with its output is full."""
    for stream in (sys.stdout, sys.stderr):
        raw = getattr(getattr(stream, "buffer", None), "raw", None)
        if isinstance(raw, _Raw):
            raw.drops_for_room = True


def flush() -> None:
    """Flush both streams while an error can still be reported. Raises: OutputLost."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
