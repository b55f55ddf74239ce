"""The time that a block takes to compute its gradients, without the time in which it waits for peers."""

from __future__ import annotations

import time


class BlockTimer:
    """The time that the main thread computes in the present block (CLOCK_MONOTONIC, in nanoseconds)."""

    def __init__(self) -> None:
        self._started_ns = 0
        self._waited_ns = 0

    def begin(self) -> None:
        """Record that a block begins now."""
        self._started_ns, self._waited_ns = time.monotonic_ns(), 0

    def waited(self, since_ns: int, until_ns: int) -> None:
        """Add the time that the main thread waited for peers; only the part in this block counts."""
        self._waited_ns += max(0, until_ns - max(since_ns, self._started_ns))

    def busy_ns(self, at_ns: int) -> int:
        """Return the time from the begin of the block to ``at_ns`` without the waits, at least 1."""
        return max(at_ns - self._started_ns - self._waited_ns, 1)

    def since_begin_ns(self) -> int:
        """Return the time since the begin of the block."""
        return time.monotonic_ns() - self._started_ns
