"""Step times of one rank, as lines ``step monotonic_ns`` in a file: what the benchmarks compare."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TextIO


class Trace:
    """Appends one line per committed step; does nothing without a directory."""

    def __init__(self, directory: Path | None, rank: int) -> None:
        self.file: TextIO | None = None
        if directory is not None:
            directory.mkdir(parents=True, exist_ok=True)
            self.file = (directory / f"rank-{rank:05d}.trace").open("a", buffering=1)

    def committed(self, step: int) -> None:
        """``step`` updates are done now."""
        if self.file is not None:
            self.file.write(f"{step} {time.monotonic_ns()}\n")

    def close(self) -> None:
        """Close the file."""
        if self.file is not None:
            self.file.close()


def read_trace(path: Path) -> list[tuple[int, int]]:
    """``(steps done, monotonic_ns)`` in the order written; a torn last line is left out."""
    pairs = []
    for line in path.read_text().splitlines(keepends=True):
        if line.endswith("\n"):
            step, moment = line.split()
            pairs.append((int(step), int(moment)))
    return pairs
