"""Step times of one rank for the benchmarks, as lines ``step monotonic_ns`` in a file."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TextIO


class Trace:
    """A file with one line per committed step; does nothing without a directory.

    Args:
        rank: called at the first line: a spare does not know its rank earlier.
    """

    def __init__(self, directory: Path | None, rank: Callable[[], int]) -> None:
        self.file: TextIO | None = None
        self._directory = directory
        self._rank = rank
        if directory is not None:
            directory.mkdir(parents=True, exist_ok=True)

    def committed(self, step: int) -> None:
        """Record that ``step`` updates are done now."""
        if self.file is None and self._directory is not None:
            self.file = (self._directory / f"rank-{self._rank():05d}.trace").open("a", buffering=1)
        if self.file is not None:
            self.file.write(f"{step} {time.monotonic_ns()}\n")

    def close(self) -> None:
        """Close the file."""
        if self.file is not None:
            self.file.close()


def read_trace(path: Path) -> list[tuple[int, int]]:
    """Return ``(steps done, monotonic_ns)`` in the order written; a torn last line is left out."""
    pairs = []
    for line in path.read_text().splitlines(keepends=True):
        if line.endswith("\n"):
            step, moment = line.split()
            pairs.append((int(step), int(moment)))
    return pairs
