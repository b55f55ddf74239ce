"""An event log that is written beside the event loop: a slow or full disk under it stops nothing else.

Theory. An agent's beat is what says that its node lives, so nothing that the agent does may wait for a disk: not for
room, not for a flush, not for the lock of the file, which other processes of the host hold while they wait. What it
writes is for people and for a later controller (the lines of the controller of another node are a copy). So lines are
taken in order, with the time at which they were said, and a thread writes them. Where they must be in the file, before
a controller reads it and at the end, ``flush`` waits.

Invariants:
1. Lines are written in the order of their appends, each whole or not at all.
2. ``append`` never waits.
3. What cannot be written, after the wait for room that its journal has, is told once to ``fail``.
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
    """Beside the running event loop.

    Args:
        journal: is written by this one alone.

    Attributes:
        fail: gets the error, in the loop; what is appended afterwards is dropped.
    """

    def __init__(self, journal: EventLog) -> None:
        self.fail: Callable[[BaseException], None] = lambda error: None
        self._journal = journal
        self._loop = asyncio.get_running_loop()
        self._lines: queue.SimpleQueue[_QueuedLine | threading.Event | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._write, name="holdfast-scribe", daemon=True)
        self._thread.start()

    def append(self, kind: str, data: Mapping[str, Field], *, durable: bool = False) -> None:
        """Write one event soon; with ``durable`` it goes to the disk at once."""
        said = Said(time.time(), time.monotonic())
        self._lines.put(_QueuedLine(kind, dict(data), durable, said))

    def flush(self) -> None:
        """Wait until all lines are written, or cannot be."""
        written = threading.Event()
        self._lines.put(written)
        written.wait()

    def close(self, over: bool = False) -> None:
        """The same, then close the file; ``over``: so is the run, and what was kept for its lines is free again."""
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
