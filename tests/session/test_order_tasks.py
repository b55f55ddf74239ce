"""The task thread of a rank executes a command only while the fence of its order is in force."""

from __future__ import annotations

import threading

import pytest

from holdfast.core.ids import Generation, MemberId
from holdfast.core.protocol.messages import Command, Fence, Settle
from holdfast.core.worker.decision_orders import CarryOut, DecisionOrder, OrderKind, RefuseOrder
from holdfast.core.worker.worker_machine import WorkerMachine
from holdfast.session.steps.order_tasks import OrderTasks

ME = MemberId(1)
FIRST, SECOND, THIRD = (Generation(1, number) for number in (1, 2, 3))
ORDER = DecisionOrder(OrderKind.DIGESTS, Settle(member_id=ME, generation=SECOND, step=0))
COMMANDS: tuple[Command, ...] = (CarryOut(ORDER, aborted=False), RefuseOrder(ORDER, "other weights"))


@pytest.mark.parametrize("command", COMMANDS, ids=["carry_out", "refuse"])
@pytest.mark.parametrize("overtaken", [False, True])
def test_a_command_of_a_fence_that_is_over_is_not_executed(command: Command, overtaken: bool) -> None:
    """Regression: a refusal that waited in the queue was reported after the next fence."""
    worker, done = WorkerMachine(ME, FIRST), list[Command]()
    tasks = OrderTasks(worker, threading.Condition(), lambda event: worker.handle(0.0, event))
    tasks.calls = tasks.calls._replace(carry_out=done.append, refuse=done.append)
    worker.steps.open(0)
    worker.handle(0.0, Fence(member_id=ME, generation=SECOND, reason="a rank is lost"))
    tasks.take(command)
    if overtaken:
        worker.handle(0.0, Fence(member_id=ME, generation=THIRD, reason="another rank is lost"))
    tasks.run()
    assert done == ([] if overtaken else [command])


def test_nothing_is_copied_for_an_update_under_a_fence() -> None:
    """An order may still read what such an update would change."""
    worker, made = WorkerMachine(ME, FIRST), list[int]()
    tasks = OrderTasks(worker, threading.Condition(), lambda event: worker.handle(0.0, event))
    worker.steps.open(0)
    assert tasks.copy(lambda: made.append(1)) and made == [1]
    worker.handle(0.0, Fence(member_id=ME, generation=SECOND, reason="a rank is lost"))
    assert not tasks.copy(lambda: made.append(2)) and made == [1]


def test_an_order_waits_for_a_copy_that_was_begun_before_its_fence() -> None:
    worker, done = WorkerMachine(ME, FIRST), list[str]()
    tasks = OrderTasks(worker, threading.Condition(), lambda event: worker.handle(0.0, event))
    tasks.calls = tasks.calls._replace(carry_out=lambda _: done.append("order"))
    worker.steps.open(0)
    thread = threading.Thread(target=tasks.run)

    def make() -> None:
        worker.handle(0.0, Fence(member_id=ME, generation=SECOND, reason="a rank is lost"))
        tasks.take(COMMANDS[0])
        thread.start()
        thread.join(0.2)
        done.append("copy")

    assert tasks.copy(make)
    thread.join()
    assert done == ["copy", "order"]
