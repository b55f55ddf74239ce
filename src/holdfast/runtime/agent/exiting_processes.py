"""Processes that were reported as exited before the kernel has freed their memory and devices.

The kernel needs milliseconds to free memory, and many seconds for a large device memory or page-locked memory. A new
worker that needs the memory waits as long as the end of the old process makes progress. An end without progress hangs
in a device or a disk, and no worker waits for it.
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
        post: takes MemoryFreed when no process is left to wait for.
    """

    def __init__(self, post: Callable[[MemoryFreed], None]) -> None:
        self._post = post
        self._until_s: dict[int, float] = {}  # by pid: the end of the wait

    def __bool__(self) -> bool:
        return bool(self._until_s)

    @property
    def pids(self) -> tuple[int, ...]:
        """The process ids that are waited for."""
        return tuple(self._until_s)

    def add(self, pid: int) -> None:
        """Begin to wait for this process."""
        self._until_s[pid] = time.monotonic() + END_MOST_S
        self._look_again(pid)

    def remove(self, pid: int) -> None:
        """Stop waiting for this process: its memory is free, or its end makes no progress."""
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
