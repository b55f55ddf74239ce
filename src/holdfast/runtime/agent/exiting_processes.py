"""Processes that were told as exited while the kernel takes them apart: their memory and devices are not free yet.

That takes milliseconds, and many seconds with a large device memory or page-locked memory. Whoever needs the room waits
as long as it makes progress; an end that stands still hangs in a device or a disk, and is not waited for.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from holdfast.runtime.node.process_info import END_MOST_S, END_STILL_S, left_of


class ExitingProcesses:
    """Such processes of one node.

    Args:
        free: called when there is none left to wait for.
    """

    def __init__(self, free: Callable[[], None]) -> None:
        self._free = free
        self._until_s: dict[int, float] = {}  # by pid: not waited for longer than this

    def __bool__(self) -> bool:
        return bool(self._until_s)

    @property
    def pids(self) -> tuple[int, ...]:
        """Their process ids."""
        return tuple(self._until_s)

    def add(self, pid: int) -> None:
        """Wait for this process from now on."""
        self._until_s[pid] = time.monotonic() + END_MOST_S
        self._look_again(pid)

    def remove(self, pid: int) -> None:
        """What it had is free again, or will not be for long."""
        self._until_s.pop(pid, None)
        if not self._until_s:
            self._free()

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
