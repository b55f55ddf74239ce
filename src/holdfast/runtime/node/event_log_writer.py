"""An event log that a thread writes, so that a slow or full disk never blocks the event loop.

Theory. The heartbeat of an agent proves that its node lives, so no action of the agent may wait for a disk. The agent
may not wait for room on the disk, for a flush, or for the lock of the file, which another process of the host holds
while it waits for the disk. The lines are read by people and by a later controller, so the agent need not wait until a
line is written. Lines are queued in order, each with the time of its append, and a thread writes them. ``flush`` waits
until all queued lines are in the file. It is called before a controller reads the file, and at the end.

Invariants:
1. Lines are written in the order of their appends. Each is written completely or not at all.
2. ``append`` never waits.
3. If a line cannot be written, even after the event log has waited for room, ``fail`` is called once.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

from holdfast.core.protocol.messages import Field
from holdfast.errors import ProtocolError
from holdfast.event_log import EventLog, Said


class _QueuedLine(NamedTuple):
    kind: str
    data: dict[str, Field]
    durable: bool
    said: Said


class EventLogWriter:
    """A thread that writes an event log beside the running event loop.

    Args:
        journal: the event log; only this object writes to it.

    Attributes:
        fail: called in the event loop with the first error of a write. Later lines are dropped.
    """

    def __init__(self, journal: EventLog) -> None:
        self.fail: Callable[[BaseException], None] = lambda error: None
        self._journal = journal
        self._loop = asyncio.get_running_loop()
        self._lines: queue.SimpleQueue[_QueuedLine | threading.Event | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._write, name="holdfast-scribe", daemon=True)
        self._thread.start()

    def append(self, kind: str, data: Mapping[str, Field], *, durable: bool = False) -> None:
        """Queue one line of the event log. With ``durable``, the line is also synced to the disk."""
        said = Said(time.time(), time.monotonic())
        self._lines.put(_QueuedLine(kind, dict(data), durable, said))

    def flush(self) -> None:
        """Wait until each queued line is written or has failed."""
        written = threading.Event()
        self._lines.put(written)
        written.wait()

    def close(self, over: bool = False) -> None:
        """Write all queued lines and close the file.

        Args:
            over: True if the run is over; the disk space reserved for more lines is then released.
        """
        self._lines.put(None)
        self._thread.join()
        if over:
            self._journal.give_back_room()
        self._journal.close()

    def _write(self) -> None:
        failed = False
        while (line := self._lines.get()) is not None:
            if isinstance(line, threading.Event):
                line.set()
            elif not failed:
                try:
                    self._journal.append(line.kind, line.data, durable=line.durable, said=line.said)
                except (OSError, ProtocolError) as error:
                    failed = True
                    with contextlib.suppress(RuntimeError):  # the loop is closed
                        self._loop.call_soon_threadsafe(self.fail, error)
