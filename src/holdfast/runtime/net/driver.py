"""The driver of a pure machine in an asyncio process: it feeds events, keeps timers, and journals before it acts."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any, Protocol

from holdfast.core.protocol.messages import CancelTimer, Command, LogRecord, Message, SetTimer, Tick
from holdfast.errors import InternalError
from holdfast.event_log import EventSink
from holdfast.runtime.net.connection_limits import is_accept

log = logging.getLogger("holdfast")


def watched(work: Coroutine[Any, Any, None], fail: Callable[[BaseException], None]) -> asyncio.Task[None]:
    """Start ``work`` as a task, and return the task. ``fail`` is called at once with an exception of the task."""

    def ended(task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            fail(error)

    task = asyncio.get_running_loop().create_task(work)
    task.add_done_callback(ended)
    return task


class Machine(Protocol):
    """The interface of every state machine in ``core/``."""

    def start(self, now: float) -> list[Command]:
        """Return the first commands, before any event."""
        ...

    def handle(self, now: float, event: Message) -> list[Command]:
        """Handle one event and return its commands, in order."""
        ...


class Driver:
    """The driver of one machine.

    All records of an event are in the log (and on the disk, if the event has other effects too) before its first
    effect happens. ``failure`` ends with the exception of a machine or executor that broke; the daemon awaits it.

    Args:
        machine: the machine.
        journal: where its records go.
        execute: carries out every command that is neither record nor timer; it may call :meth:`post`.
        sync: puts the journal on the disk, in a thread: effects and later events wait for it, the event loop does not.
            None: the journal does so itself.
    """

    def __init__(
        self,
        machine: Machine,
        journal: EventSink,
        execute: Callable[[Command], None],
        sync: Callable[[], None] | None = None,
    ) -> None:
        self.machine = machine
        self.failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._journal = journal
        self._execute = execute
        self._sync = sync
        self._syncing: asyncio.Future[None] | None = None
        self._events: deque[tuple[float, Message | None]] = deque()  # when it came; None: start
        self._busy = self._closed = False
        self._timers: dict[str, asyncio.TimerHandle] = {}

    def start(self) -> None:
        """Start the machine. Call this before :meth:`post`."""
        self._run(None)

    def post(self, event: Message) -> None:
        """Handle ``event``, after those that are being handled. Nothing happens once the driver failed or closed."""
        self._run(event)

    def _run(self, event: Message | None) -> None:
        self._events.append((time.monotonic(), event))
        self._drain()

    def _drain(self) -> None:
        if self._busy:
            return
        self._busy = True
        try:
            while self._events and self._syncing is None and not self.failure.done():
                self._step(*self._events.popleft())
        except Exception as error:  # whatever broke: the daemon must end with it, not go on half-alive
            self.fail(error)
        finally:
            self._busy = False

    def fail(self, error: BaseException) -> None:
        """Set ``error`` as the exception of ``failure``, unless it has one, and close the driver."""
        if not self.failure.done():
            self.failure.set_exception(error)
        self.close()

    def guard_loop(self) -> None:
        """Let an exception in any callback of the event loop be a failure, instead of a line in a log.

        But a connection that cannot be accepted, which any stranger can bring about.
        """

        def failed(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
            if is_accept(context):
                log.warning("holdfast: cannot take a connection, trying on: %s", context["exception"])
                return
            loop.default_exception_handler(context)
            self.fail(context.get("exception") or InternalError(str(context["message"])))

        asyncio.get_running_loop().set_exception_handler(failed)

    def close(self) -> None:
        """Forget all timers and events."""
        self._closed = True
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()
        self._events.clear()

    def _step(self, now: float, event: Message | None) -> None:
        commands = self.machine.start(now) if event is None else self.machine.handle(now, event)
        records = [command for command in commands if isinstance(command, LogRecord)]
        durable = any(not isinstance(command, LogRecord | SetTimer | CancelTimer) for command in commands)
        beside = durable and bool(records) and self._sync is not None
        for index, record in enumerate(records):
            last = index == len(records) - 1
            self._journal.append(record.kind, record.data, durable=durable and last and not beside)
        if beside and self._sync is not None:
            self._syncing = asyncio.get_running_loop().run_in_executor(None, self._sync)
            self._syncing.add_done_callback(lambda synced: self._synced(synced, commands))
        else:
            self._carry_out(commands)

    def _synced(self, synced: asyncio.Future[None], commands: list[Command]) -> None:
        """Carry out the commands of an event whose records are on the disk, then handle later events."""
        self._syncing = None
        if self.failure.done() or self._closed or synced.cancelled():
            return
        self._busy = True
        try:
            synced.result()
            self._carry_out(commands)
        except Exception as error:  # as in :meth:`_run`
            self.fail(error)
        finally:
            self._busy = False
        self._drain()

    def _carry_out(self, commands: list[Command]) -> None:
        for command in commands:
            if isinstance(command, SetTimer):
                self._set_timer(command.name, command.delay_s)
            elif isinstance(command, CancelTimer):
                self._cancel_timer(command.name)
            elif not isinstance(command, LogRecord):
                self._execute(command)

    def _set_timer(self, name: str, delay_s: float) -> None:
        self._cancel_timer(name)
        loop = asyncio.get_running_loop()
        self._timers[name] = loop.call_later(delay_s, self._fire, name)

    def _cancel_timer(self, name: str) -> None:
        timer = self._timers.pop(name, None)
        if timer is not None:
            timer.cancel()

    def _fire(self, name: str) -> None:
        self._timers.pop(name, None)
        self.post(Tick(name=name))
