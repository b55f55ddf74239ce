"""A rank that has stopped with all others for a change of seats: what ends its wait."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from holdfast.core.protocol.messages import Message
from holdfast.core.protocol.notices import HoldOrder, HoldOver, HoldReached
from holdfast.session.steps import pause
from holdfast.session.steps.participant import StepParticipant
from tests.session.participants import Connection, generation

STEP = 7
SHORT_LIMIT_S = 0.2
LONG_LIMIT_S = 60.0
SOON_S = 0.05


class Line(Connection):
    """A connection that keeps the handlers of messages."""

    def __init__(self) -> None:
        super().__init__()
        self.handlers: dict[type[Message], Callable[..., None]] = {}

    def on(self, kind: type[Message], handler: Callable[..., None]) -> None:
        """Keep a handler."""
        self.handlers[kind] = handler

    def come(self, message: Message) -> None:
        """Let a message come."""
        self.handlers[type(message)](message)


@pytest.fixture
def line(monkeypatch: pytest.MonkeyPatch) -> Line:
    """Return a connection. The limit of a wait is longer than any delay of the machine."""
    monkeypatch.setattr(pause, "HOLD_S", LONG_LIMIT_S)
    return Line()


@pytest.fixture
def short_limit(line: Line, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the limit end the wait. The limit of the connection's fixture is set before."""
    monkeypatch.setattr(pause, "HOLD_S", SHORT_LIMIT_S)


def stopping(line: Line) -> tuple[StepParticipant, pause.Pause]:
    """Return a rank before ``STEP``, and its part in the stops of all ranks."""
    adapter: Any = None
    client: Any = line
    rank = StepParticipant(adapter, client)
    rank.machine.open(STEP)
    return rank, pause.Pause(rank)


def waited_s(stop: pause.Pause, *messages: Callable[[], None]) -> float:
    """Return the duration of the wait. The messages come while it lasts."""
    threads = [threading.Timer(SOON_S, message) for message in messages]
    for thread in threads:
        thread.start()
    begun_s = time.monotonic()
    stop.wait()
    duration_s = time.monotonic() - begun_s
    for thread in threads:
        thread.join()
    return duration_s


def over(line: Line, step: int = STEP, number: int = 1) -> HoldOver:
    """Return the order to continue."""
    return HoldOver(member_id=line.member_id, generation=generation(number), step=step)


@pytest.mark.usefixtures("short_limit")
def test_without_an_answer_the_wait_ends_by_its_limit(line: Line) -> None:
    assert waited_s(stopping(line)[1]) >= SHORT_LIMIT_S


def test_the_order_to_continue_ends_the_wait(line: Line) -> None:
    _, stop = stopping(line)
    assert waited_s(stop, lambda: line.come(over(line))) < LONG_LIMIT_S


def test_an_order_to_continue_that_comes_first_counts_too(line: Line) -> None:
    _, stop = stopping(line)
    line.come(over(line))
    assert waited_s(stop) < LONG_LIMIT_S


@pytest.mark.usefixtures("short_limit")
@pytest.mark.parametrize(("step", "number"), [(STEP - 1, 1), (STEP, 0)])
def test_an_order_about_an_earlier_stop_does_not_count(line: Line, step: int, number: int) -> None:
    _, stop = stopping(line)
    line.come(over(line, step, number))
    assert waited_s(stop) >= SHORT_LIMIT_S


def test_a_fence_ends_the_wait(line: Line) -> None:
    rank, stop = stopping(line)

    def fence() -> None:
        with rank.changed:
            rank.machine.fence(generation(2))
            rank.changed.notify_all()

    assert waited_s(stop, fence) < LONG_LIMIT_S


def test_the_rank_that_was_asked_reports_each_stop_once(line: Line) -> None:
    _, stop = stopping(line)
    line.come(HoldOrder(member_id=line.member_id, generation=generation(1)))
    line.come(over(line))
    assert stop.asked
    stop.wait()
    stop.wait()
    assert [report.step for report in line.of(HoldReached)] == [STEP] and not stop.asked
