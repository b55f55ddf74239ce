"""Stdout and stderr of a worker: each line is in the log when it is printed, and a full disk ends no training.

An interpreter that writes to a file keeps eight KiB back: nothing would be seen of a slow script, and the last words of
one that is killed would be lost. And a line of a log that cannot be written is no reason to lose a job: it is dropped.
"""

from __future__ import annotations

import io
import sys
from typing import Any, TextIO

from holdfast.errors import NO_ROOM


class _Log(io.FileIO):
    """A descriptor; what it has no room for is dropped."""

    def write(self, data: Any) -> int:
        """As any file, but all of ``data`` counts as written. Raises: OSError, other than for a lack of room."""
        left = memoryview(data).cast("B")
        try:
            while left:
                left = left[super().write(left) :]
        except OSError as error:
            if error.errno not in NO_ROOM:
                raise
        return len(data)


def by_line() -> None:
    """Let ``sys.stdout`` and ``sys.stderr`` of this process be such streams."""
    sys.stdout = _stream(1, sys.stdout)
    sys.stderr = _stream(2, sys.stderr)


def _stream(fd: int, before: TextIO) -> TextIO:
    if not isinstance(before, io.TextIOWrapper):  # somebody else's
        return before
    before.flush()
    return io.TextIOWrapper(
        io.BufferedWriter(_Log(fd, "wb", closefd=False)),
        encoding=before.encoding,
        errors=before.errors,
        line_buffering=True,
        write_through=before.write_through,
    )
