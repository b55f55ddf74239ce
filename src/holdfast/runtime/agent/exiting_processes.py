"""Processes that were reported as exited before the kernel has freed their memory and devices.

Freeing takes milliseconds for ordinary memory, and many seconds for a large device memory or page-locked memory. No new
worker starts while the exit of an old process makes progress, for at most ``END_MOST_S`` seconds. An exit without
progress is stuck in a device or a disk, and no worker waits for it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from holdfast.runtime.agent.agent_events import MemoryFreed
from holdfast.runtime.node.process_info import END_MOST_S, END_STILL_S, left_of


class ExitingProcesses:
    """The exiting processes of one node.

    Args:
        post: receives MemoryFreed when no process is left to wait for.
    """

    def __init__(self, post: Callable[[MemoryFreed], None]) -> None:
        self._post = post
        self._until_s: dict[int, float] = {}  # by pid: the latest end of the wait

    def __bool__(self) -> bool:
        return bool(self._until_s)

    @property
    def pids(self) -> tuple[int, ...]:
        """The ids of the processes that new workers wait for."""
        return tuple(self._until_s)

    def add(self, pid: int) -> None:
        """Begin to wait for the exit of process ``pid``."""
        self._until_s[pid] = time.monotonic() + END_MOST_S
        self._look_again(pid)

    def remove(self, pid: int) -> None:
        """Stop waiting for process ``pid``: its memory is free, or its exit is stuck or takes too long."""
        self._until_s.pop(pid, None)
        if not self._until_s:
            self._post(MemoryFreed())

    def _look_again(self, pid: int) -> None:
        before = left_of(pid)

        def look() -> None:
            if pid not in self._until_s:
                return
            left = left_of(pid)
            if left is None or left == before or time.monotonic() > self._until_s[pid]:
                self.remove(pid)
            else:
                self._look_again(pid)

        asyncio.get_running_loop().call_later(END_STILL_S, look)
