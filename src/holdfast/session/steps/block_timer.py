"""The time that a block takes to compute its gradients, without the time that it waits for other ranks."""

from __future__ import annotations

import time


class BlockTimer:
    """The time that the main thread has computed in the open block, in nanoseconds of CLOCK_MONOTONIC."""

    def __init__(self) -> None:
        self._started_ns = 0
        self._waited_ns = 0

    def begin(self) -> None:
        """Record that a block begins now, with no wait yet."""
        self._started_ns, self._waited_ns = time.monotonic_ns(), 0

    def waited(self, since_ns: int, until_ns: int) -> None:
        """Add a wait of the main thread for other ranks. The part of the wait before the open block is left out."""
        self._waited_ns += max(0, until_ns - max(since_ns, self._started_ns))

    def busy_ns(self, at_ns: int) -> int:
        """Return the nanoseconds from the start of the open block to ``at_ns``, without waits; at least 1."""
        return max(at_ns - self._started_ns - self._waited_ns, 1)

    def since_begin_ns(self) -> int:
        """Return the nanoseconds since the start of the open block, including its waits."""
        return time.monotonic_ns() - self._started_ns
