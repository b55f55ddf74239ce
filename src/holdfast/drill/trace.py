"""The times at which one rank committed its steps, for benchmarks: lines ``step monotonic_ns`` in a file."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TextIO


class Trace:
    """A file with one line per committed step. Without a directory no file is written.

    Args:
        directory: directory of the file; with None nothing is written.
        rank: returns the rank. It is called at the first line, because a spare does not know its rank earlier.
    """

    def __init__(self, directory: Path | None, rank: Callable[[], int]) -> None:
        self.file: TextIO | None = None
        self._directory = directory
        self._rank = rank
        if directory is not None:
            directory.mkdir(parents=True, exist_ok=True)

    def committed(self, step: int) -> None:
        """Record the present time as the moment at which ``step`` updates are done."""
        if self.file is None and self._directory is not None:
            self.file = (self._directory / f"rank-{self._rank():05d}.trace").open("a", buffering=1)
        if self.file is not None:
            self.file.write(f"{step} {time.monotonic_ns()}\n")

    def close(self) -> None:
        """Close the file, if a line was written."""
        if self.file is not None:
            self.file.close()


def read_trace(path: Path) -> list[tuple[int, int]]:
    """Return pairs ``(steps done, monotonic_ns)`` in the order written. An incomplete last line is left out."""
    pairs = []
    for line in path.read_text().splitlines(keepends=True):
        if line.endswith("\n"):
            step, moment = line.split()
            pairs.append((int(step), int(moment)))
    return pairs
