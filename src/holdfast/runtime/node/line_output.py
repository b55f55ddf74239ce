"""Stdout and stderr of a worker: each line reaches the log at once, and a full disk does not stop the training.

By default, Python buffers 8 KiB of output to a file. With this buffer the log of a slow script would stay empty, and
the last lines of a killed script would be lost. A line that cannot be written to the log is dropped, because a job must
not fail for it.
"""

from __future__ import annotations

import io
import sys
from typing import Any, TextIO

from holdfast.errors import NO_ROOM


class _Log(io.FileIO):
    """A file descriptor for output that is dropped if the disk has no room."""

    def write(self, data: Any) -> int:
        """Write ``data``, and return its length even if the disk has no room.

        Raises: OSError, except for a lack of room.
        """
        left = memoryview(data).cast("B")
        try:
            while left:
                left = left[super().write(left) :]
        except OSError as error:
            if error.errno not in NO_ROOM:
                raise
        return len(data)


def by_line() -> None:
    """Replace ``sys.stdout`` and ``sys.stderr`` by streams that write each line at once and survive a full disk."""
    sys.stdout = _stream(1, sys.stdout)
    sys.stderr = _stream(2, sys.stderr)


def _stream(fd: int, before: TextIO) -> TextIO:
    if not isinstance(before, io.TextIOWrapper):  # replaced by another program
        return before
    before.flush()
    return io.TextIOWrapper(
        io.BufferedWriter(_Log(fd, "wb", closefd=False)),
        encoding=before.encoding,
        errors=before.errors,
        line_buffering=True,
        write_through=before.write_through,
    )
