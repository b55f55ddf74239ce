"""The driver of a state machine on a simulated host: a model of ``runtime/net/driver.py`` on a virtual clock.

The driver writes the event-log records of an event to the log before it executes the other commands of that event. If
``sync_s`` is set, it also syncs the log to the disk before these commands, and later events wait for the sync.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from functools import partial
from typing import Protocol

from holdfast.core.ids import NodeId
from holdfast.core.protocol.messages import CancelTimer, Command, LogRecord, Message, SetTimer, Tick
from holdfast.sim.hosts.sim_disk import DiskFullError


class DrivenMachine(Protocol):
    """The interface of every state machine in ``core/``."""

    def start(self, now: float) -> list[Command]: ...
    def handle(self, now: float, event: Message) -> list[Command]: ...
    def check(self) -> None: ...


class DriverScene(Protocol):
    """The interface of the simulated world that a driver uses."""

    def clock(self, node_id: NodeId) -> float: ...
    def later_on(self, node_id: NodeId, delay_s: float, label: str, action: Callable[[], None]) -> None: ...


class SimDriver:
    """The driver of one state machine in a simulated process.

    Args:
        name: name of the state machine in the labels of simulated events.
        execute: called with every command that is neither a record nor a timer.
        fail: called when the process cannot continue because its disk is full.

    Attributes:
        journal: called with each event-log record.
        sync_s: returns the duration of a sync in virtual seconds; None if the driver does not sync.
        synced: called after each sync.
    """

    def __init__(
        self,
        scene: DriverScene,
        host: NodeId,
        name: str,
        machine: DrivenMachine,
        execute: Callable[[Command], None],
        fail: Callable[[], None],
    ) -> None:
        self.journal: Callable[[LogRecord], None] = lambda record: None
        self.sync_s: Callable[[], float] | None = None
        self.synced: Callable[[], None] = lambda: None
        self._scene = scene
        self._host = host
        self._name = name
        self._machine = machine
        self._execute = execute
        self._fail = fail
        self._events: deque[tuple[float, Message | None, int]] = deque()
        self._busy = self._syncing = self._closed = False
        self._timers: Counter[str] = Counter()  # how often each timer was set or cancelled

    def start(self) -> None:
        """Start the state machine."""
        self._take(None)

    def post(self, event: Message) -> None:
        """Pass ``event`` to the state machine, after the events that were posted before."""
        self._take(event)

    def close(self) -> None:
        """Drop all events, because the process has ended."""
        self._closed = True
        self._events.clear()

    def _take(self, event: Message | None, token: int = 0) -> None:
        if not self._closed:
            self._events.append((self._scene.clock(self._host), event, token))
            self._drain()

    def _drain(self) -> None:
        if self._busy:
            return
        self._busy = True
        try:
            while self._events and not self._syncing and not self._closed:
                self._step(*self._events.popleft())
        except DiskFullError:
            self.close()
            self._fail()
        finally:
            self._busy = False

    def _step(self, now: float, event: Message | None, token: int) -> None:
        if isinstance(event, Tick) and token not in (0, self._timers[event.name]):
            return  # the machine has set or cancelled the timer since it fired
        commands = self._machine.start(now) if event is None else self._machine.handle(now, event)
        self._machine.check()
        records = [command for command in commands if isinstance(command, LogRecord)]
        for record in records:
            self.journal(record)
        effects = any(not isinstance(command, LogRecord | SetTimer | CancelTimer) for command in commands)
        if records and effects and self.sync_s is not None:
            self._syncing = True
            self._timers.update(c.name for c in commands if isinstance(c, SetTimer | CancelTimer))
            self._scene.later_on(
                self._host, self.sync_s(), f"{self._name} synced", partial(self._on_disk, commands)
            )
        else:
            self._carry_out(commands)

    def _on_disk(self, commands: list[Command]) -> None:
        self._syncing = False
        if self._closed:
            return
        self.synced()
        self._busy = True
        try:
            self._carry_out(commands)
        except DiskFullError:
            self.close()
            self._fail()
        finally:
            self._busy = False
        self._drain()

    def _carry_out(self, commands: list[Command]) -> None:
        for command in commands:
            if self._closed:
                return
            if isinstance(command, SetTimer):
                self._timers[command.name] += 1
                fire = partial(self._fire, command.name, self._timers[command.name])
                self._scene.later_on(self._host, command.delay_s, f"tick {self._name} {command.name}", fire)
            elif isinstance(command, CancelTimer):
                self._timers[command.name] += 1
            elif not isinstance(command, LogRecord):
                self._execute(command)

    def _fire(self, name: str, token: int) -> None:
        if self._timers[name] == token:
            self._take(Tick(name=name), token)
