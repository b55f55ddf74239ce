"""Handling of failed writes to stdout and stderr.

Theory. click, rich and the interpreter each handle a failed write differently, and none of them exits with a code of
Holdfast. The process therefore writes through a raw stream of this module. The stream raises :class:`OutputLost` at the
first failed write and drops all later output.
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
    """The error of a failed write to stdout.

    It is not an ``OSError``, so that no handler for ``OSError`` catches it.
    """

    def __init__(self, error: OSError) -> None:
        super().__init__(str(error))
        self.error = error

    def answer(self) -> Exit:
        """Print the error, and return the exit code of the command.

        For a closed pipe nothing is printed, because ``holdfast ... | head`` closes the pipe without an error.
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
        """Write ``data``, and return the number of bytes written or dropped.

        Raises:
            OutputLost: this is the first write to stdout that failed. Later calls drop ``data`` and do not raise.
        """
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
    """Replace stdout and stderr by streams that handle a failed write.

    A failed write to stdout raises ``OutputLost``. A failed write to stderr is ignored, because no stream is left to
    report it. A stream that the shell has closed (``>&-``) becomes the null device. Otherwise the next opened file
    would get the same descriptor number, and with it the output.
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
        errors="backslashreplace",  # the terminal's encoding may lack characters of a rank's output or a file name
        line_buffering=stream.line_buffering or stream.write_through,
    )


def outlive_full_disk() -> None:
    """From now on, drop output that fails because a disk is full, so that a full disk does not end the job."""
    for stream in (sys.stdout, sys.stderr):
        raw = getattr(getattr(stream, "buffer", None), "raw", None)
        if isinstance(raw, _Raw):
            raw.drops_for_room = True


def flush() -> None:
    """Flush stdout and stderr, while an error can still be reported. Raises: OutputLost."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
