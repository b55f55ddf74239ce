"""The task thread of a rank. It carries out the orders of a decision when the rank's state machine commands it.

Theory. The state machine of the rank (``core/worker/worker_machine.py``) is called *the machine* here. It keeps an
order until the conditions of the order hold (``core/worker/decision_orders.py``), and then returns a command. A
condition may become true in any thread, for example when the script enters its next block. The task thread executes the
command, because reading and sending a state takes long. While orders wait, the task thread sleeps until a command is
queued or a timer of the machine expires. This thread makes no decision.

Invariants:
1. Commands are executed in the order in which the machine returned them.
2. A command is not executed if its fence is no longer in force when the task thread reaches the command.
3. A fence aborts a block while the script still runs in it. While an order is carried out, the block makes no tentative
   update whose copies the order has not seen (:meth:`OrderTasks.copy`).
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
    """The queue of the state machine's long commands, and their execution in the task thread.

    Args:
        worker: the state machine of this rank.
        changed: the lock of ``worker``, a condition that is notified after each change of ``worker``.
        report: passes an event to ``worker``, and returns the resulting commands.

    Attributes:
        calls: the functions of the session that execute the commands.
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
        self._copying = threading.Lock()

    def copy(self, make: Callable[[], None]) -> bool:
        """Call ``make``, a function that copies the state which a tentative update of an open block is about to change.

        An order reads the state itself if there is no copy, and may take seconds to read it. So under a fence
        ``make`` is not called, and the update must not be made.

        Returns:
            False under a fence.
        """
        with self._copying:
            if self._worker.steps.fenced is not None:
                return False
            make()
            return True

    @property
    def any(self) -> bool:
        """True if a command is queued, or an order waits for its conditions."""
        return bool(self._queue or self._worker.orders.waiting)

    def take(self, command: Command) -> None:
        """Take a command of the state machine: queue it, set a timer, or log a warning. The caller holds the lock."""
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
        """Carry out queued commands until none is left and no order waits. Runs in the task thread."""
        while (task := self._next()) is not None:
            match task:
                case CarryOut():
                    if self._is_in_force(task):
                        with self._copying:  # copies that were begun before the fence are then complete
                            pass
                        self.calls.carry_out(task)
                    self.end_serving(self._report(OrderEnded(task.order.settle.generation)))
                case RefuseOrder():
                    if self._is_in_force(task):
                        self.calls.refuse(task)
                case LookAtWeights():
                    self._report(WeightsSeen(self.calls.trained()))

    def end_serving(self, commands: tuple[Command, ...]) -> None:
        """Stop serving this rank's state to replacements if ``commands`` contain an ``EndServing``."""
        for command in commands:
            if isinstance(command, EndServing):
                self.calls.end_serving()
                self._report(ServingEnded(command.generation))

    def _is_in_force(self, task: CarryOut | RefuseOrder) -> bool:
        """Return whether this rank is still under the fence for which the order was given."""
        return self._worker.steps.fenced == task.order.settle.generation

    def _next(self) -> Task | None:
        """Wait for the next command, and return it. Return None if no command is queued and no order waits."""
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
