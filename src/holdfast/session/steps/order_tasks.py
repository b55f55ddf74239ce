"""The task thread of a rank: it carries out the orders of a decision when the rank's state machine commands it.

Theory. The state machine (``core/worker/worker_machine.py``, below *the machine*) keeps an order until its conditions
hold (``core/worker/decision_orders.py``), and then returns a command. The condition may come true in any thread, for
example when the script enters its next block. The command is executed here, in the task thread, because reading and
sending a state takes long. While orders wait, this thread sleeps until a command is there or a timer of the machine is
over. This thread makes no decision.

Invariants:
1. Commands are executed in the order in which the machine returned them.
2. A command whose fence is no longer in force when its turn comes is not executed.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable

from holdfast.core.protocol.messages import Command, Message, SetTimer, Tick
from holdfast.core.worker.decision_orders import CarryOut, LookAtWeights, RefuseOrder, WarnOfScript
from holdfast.core.worker.worker_machine import (
    EndServing,
    OrderEnded,
    ServingEnded,
    WeightsSeen,
    WorkerMachine,
)
from holdfast.session.steps.participant_calls import ParticipantCalls

log = logging.getLogger("holdfast")

POLL_S = 0.5

Task = CarryOut | RefuseOrder | LookAtWeights


class OrderTasks:
    """The queue of the machine's commands that take long, and their execution in the task thread.

    Args:
        worker: the machine.
        changed: the lock of the machine. It is notified when the state of the machine has changed.
        report: passes an event to the machine, and returns its commands.
    """

    def __init__(
        self,
        worker: WorkerMachine,
        changed: threading.Condition,
        report: Callable[[Message], tuple[Command, ...]],
    ) -> None:
        self.calls = ParticipantCalls()
        self._worker = worker
        self._changed = changed
        self._report = report
        self._queue: deque[Task] = deque()
        self._due_s: dict[str, float] = {}

    @property
    def any(self) -> bool:
        """True if there is an order to carry out, now or later."""
        return bool(self._queue or self._worker.orders.waiting)

    def take(self, command: Command) -> None:
        """Queue a command that takes long, set a timer, or log a warning. The caller holds the lock."""
        match command:
            case CarryOut() | RefuseOrder() | LookAtWeights():
                self._queue.append(command)
            case WarnOfScript():
                log.warning(
                    "holdfast: code after the block of step %d has run for %g s: all ranks restart and do not run it "
                    "again; move slow work before a block or after the loop",
                    command.step,
                    command.waited_s,
                )
            case SetTimer():
                self._due_s[command.name] = time.monotonic() + command.delay_s

    def run(self) -> None:
        """Carry out the orders until none is left. Runs in the task thread."""
        while (task := self._next()) is not None:
            match task:
                case CarryOut():
                    if self._is_in_force(task):
                        self.calls.carry_out(task)
                    self.end_serving(self._report(OrderEnded(task.order.settle.generation)))
                case RefuseOrder():
                    if self._is_in_force(task):
                        self.calls.refuse(task)
                case LookAtWeights():
                    self._report(WeightsSeen(self.calls.trained()))

    def end_serving(self, commands: tuple[Command, ...]) -> None:
        """Stop serving the state, if the machine orders it."""
        for command in commands:
            if isinstance(command, EndServing):
                self.calls.end_serving()
                self._report(ServingEnded(command.generation))

    def _is_in_force(self, task: CarryOut | RefuseOrder) -> bool:
        """Return whether the fence of the order still holds."""
        return self._worker.steps.fenced == task.order.settle.generation

    def _next(self) -> Task | None:
        """Wait for the next command. Return None if no order is left."""
        with self._changed:
            while not self._queue:
                if not self._worker.orders.waiting:
                    return None
                now_s = time.monotonic()
                over = [name for name, due_s in self._due_s.items() if due_s <= now_s]
                for name in over:
                    del self._due_s[name]
                    self._report(Tick(name=name))
                if not over:
                    self._changed.wait(min([POLL_S, *(due_s - now_s for due_s in self._due_s.values())]))
            return self._queue.popleft()
