"""When stdout or stderr cannot take what a command prints.

Theory. click, rich and the interpreter have answers of their own to a failed write, each another one and none with a
code of ours. So the error is met below them: the process writes through a raw stream that turns it into
:class:`OutputLost`, once; what comes after it is dropped.
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
    """Stdout could not be written. No ``OSError``: nobody in between shall take it for one that it knows."""

    def __init__(self, error: OSError) -> None:
        super().__init__(str(error))
        self.error = error

    def answer(self) -> Exit:
        """Say it, and the exit code. A pipe that nobody reads is said by nobody: ``head`` has what it wanted."""
        if isinstance(self.error, BrokenPipeError):
            return Exit.PIPE
        return show(
            UserError(
                f"cannot write the output: {self.error.strerror or self.error}",
                hint="send it elsewhere, or free some space",
            )
        )


class _Raw(io.FileIO):
    """A descriptor that answers for the first write that failed, and takes everything after it."""

    def __init__(self, fd: int, *, silent: bool) -> None:
        super().__init__(fd, "wb", closefd=False)
        self.drops_for_room = False
        self._silent = silent
        self._lost = False

    def write(self, data: Any) -> Any:
        """As any file; raises :class:`OutputLost`."""
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
    """Write through streams that tell a lost output; of a lost stderr nobody can be told.

    What was closed (``>&-``) is the null device, else the next file that is opened would be taken for it.
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
    if not isinstance(stream, io.TextIOWrapper):  # closed, or somebody else's
        return stream
    stream.flush()
    return io.TextIOWrapper(
        io.BufferedWriter(_Raw(stream.fileno(), silent=silent)),
        encoding=stream.encoding,
        errors="backslashreplace",  # what a rank prints, or a name of a file, may be in no encoding of this terminal
        line_buffering=stream.line_buffering or stream.write_through,
    )


def outlive_full_disk() -> None:
    """From now on drop what there is no room for: a job does not end because the file with its output is full."""
    for stream in (sys.stdout, sys.stderr):
        raw = getattr(getattr(stream, "buffer", None), "raw", None)
        if isinstance(raw, _Raw):
            raw.drops_for_room = True


def flush() -> None:
    """Have everything out while an error can still be told. Raises: OutputLost."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
