"""The driver of a pure state machine in an asyncio process.

The driver feeds events to the state machine (in this module *the machine*) and runs the machine's timers. It writes the
machine's records to the journal before it executes the machine's commands.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Coroutine
from typing import Any, NamedTuple, Protocol

from holdfast.core.protocol.messages import CancelTimer, Command, LogRecord, Message, SetTimer, Tick
from holdfast.errors import InternalError
from holdfast.event_log import EventSink
from holdfast.runtime.net.connection_limits import is_accept

log = logging.getLogger("holdfast")


def watched(work: Coroutine[Any, Any, None], fail: Callable[[BaseException], None]) -> asyncio.Task[None]:
    """Start ``work`` as a task and return the task. If the task raises, call ``fail`` with the exception."""

    def ended(task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            fail(error)

    task = asyncio.get_running_loop().create_task(work)
    task.add_done_callback(ended)
    return task


class Machine(Protocol):
    """The interface of every state machine in ``core/``. Times are in seconds on the monotonic clock."""

    def start(self, now: float) -> list[Command]:
        """Start the state machine and return its first commands, before any event."""
        ...

    def handle(self, now: float, event: Message) -> list[Command]:
        """Handle one event, and return the commands to execute because of it, in order."""
        ...


class _Arrived(NamedTuple):
    """An event that waits for the machine. The event None is the start.

    ``setting`` is the number of times that the timer of a tick was set or cancelled when it was armed; 0: no timer.
    """

    now: float
    event: Message | None
    setting: int


class Driver:
    """The driver of one state machine.

    All records of an event are in the journal before the first command of the event is executed. They are also on the
    disk by then if the event has commands other than records and timers. A timer that the machine sets again or cancels
    gives no tick from that moment, although its new time begins only after the sync.

    If the machine or ``execute`` raises, the future ``failure`` gets the exception. The process that owns the driver
    awaits ``failure``.

    Args:
        machine: the state machine.
        journal: receives the records of the machine.
        execute: executes every command that is neither a record nor a timer. It may call :meth:`post`.
        sync: writes the journal to the disk. It runs in a thread. Commands and later events wait for it, but the event
            loop does not. None if the journal syncs its durable records itself.
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
        self._events: deque[_Arrived] = deque()
        self._busy = self._closed = False
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._settings: Counter[str] = Counter()  # how often each timer was set or cancelled

    def start(self) -> None:
        """Start the state machine. Call this before :meth:`post`."""
        self._run(None)

    def post(self, event: Message) -> None:
        """Handle ``event`` after the events already posted. Do nothing if the driver has failed or is closed."""
        self._run(event)

    def _run(self, event: Message | None, setting: int = 0) -> None:
        self._events.append(_Arrived(time.monotonic(), event, setting))
        self._drain()

    def _drain(self) -> None:
        if self._busy:
            return
        self._busy = True
        try:
            while self._events and self._syncing is None and not self.failure.done():
                self._step(self._events.popleft())
        except Exception as error:  # any failure must end the daemon: half alive, it would block the job
            self.fail(error)
        finally:
            self._busy = False

    def fail(self, error: BaseException) -> None:
        """Make ``error`` the exception of the future ``failure``, unless that has one already, and close the driver."""
        if not self.failure.done():
            self.failure.set_exception(error)
        self.close()

    def guard_loop(self) -> None:
        """Treat an exception in any callback of the event loop as a failure of the driver.

        One case is only logged: a connection that cannot be accepted. An unauthenticated peer can cause it.
        """

        def failed(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
            if is_accept(context):
                log.warning("holdfast: cannot take a connection, trying on: %s", context["exception"])
                return
            loop.default_exception_handler(context)
            self.fail(context.get("exception") or InternalError(str(context["message"])))

        asyncio.get_running_loop().set_exception_handler(failed)

    def close(self) -> None:
        """Cancel all timers and drop all pending events."""
        self._closed = True
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()
        self._events.clear()

    def _step(self, arrived: _Arrived) -> None:
        now, event, setting = arrived
        if isinstance(event, Tick) and setting not in (0, self._settings[event.name]):
            return  # the machine has set or cancelled the timer since it fired
        commands = self.machine.start(now) if event is None else self.machine.handle(now, event)
        records = [command for command in commands if isinstance(command, LogRecord)]
        durable = any(not isinstance(command, LogRecord | SetTimer | CancelTimer) for command in commands)
        beside = durable and bool(records) and self._sync is not None
        for index, record in enumerate(records):
            last = index == len(records) - 1
            self._journal.append(record.kind, record.data, durable=durable and last and not beside)
        if beside and self._sync is not None:
            for command in commands:  # during the sync, the machine has no use for the old timers
                if isinstance(command, SetTimer | CancelTimer):
                    self._cancel_timer(command.name)
            self._syncing = asyncio.get_running_loop().run_in_executor(None, self._sync)
            self._syncing.add_done_callback(lambda synced: self._synced(synced, commands))
        else:
            self._carry_out(commands)

    def _synced(self, synced: asyncio.Future[None], commands: list[Command]) -> None:
        """Execute the commands of an event whose records are now on the disk, and then handle later events."""
        self._syncing = None
        if self.failure.done() or self._closed or synced.cancelled():
            return
        self._busy = True
        try:
            synced.result()
            self._carry_out(commands)
        except Exception as error:  # as in :meth:`_drain`
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
        self._timers[name] = loop.call_later(delay_s, self._fire, name, self._settings[name])

    def _cancel_timer(self, name: str) -> None:
        self._settings[name] += 1
        timer = self._timers.pop(name, None)
        if timer is not None:
            timer.cancel()

    def _fire(self, name: str, setting: int) -> None:
        self._timers.pop(name, None)
        self._run(Tick(name=name), setting)
