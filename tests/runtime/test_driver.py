"""The driver: order of journal and effects, timers, and no silent failure."""

from __future__ import annotations

import asyncio
import errno
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from holdfast import event_log
from holdfast.core.ids import NodeId
from holdfast.core.protocol.messages import (
    AgentBeat,
    CancelTimer,
    Command,
    Finish,
    LogRecord,
    Message,
    SetTimer,
    Tick,
)
from holdfast.errors import InternalError
from holdfast.event_log import EventLog
from holdfast.runtime.net.driver import Driver, watched

BEAT = AgentBeat(node_id=NodeId("n"))


class Script:
    """A machine that answers the n-th event with the n-th list of commands."""

    def __init__(self, *answers: list[Command]) -> None:
        self.answers = list(answers)
        self.events: list[Message] = []

    def start(self, now: float) -> list[Command]:
        return self.answers.pop(0)

    def handle(self, now: float, event: Message) -> list[Command]:
        self.events.append(event)
        return self.answers.pop(0)


def run(
    path: Path, machine: Script, body: Callable[[Driver], None], execute: Callable[[Command], None]
) -> BaseException | None:
    """Drive ``machine`` until ``Finish`` was executed or the driver failed. Returns the failure."""

    async def main() -> BaseException | None:
        over = asyncio.get_running_loop().create_future()

        def act(command: Command) -> None:
            execute(command)
            if isinstance(command, Finish):
                over.set_result(None)

        log = EventLog.open(path, "test")
        driver = Driver(machine, log, act)
        driver.guard_loop()
        body(driver)
        await asyncio.wait({over, driver.failure}, timeout=10, return_when=asyncio.FIRST_COMPLETED)
        log.close()
        driver.close()
        return driver.failure.exception() if driver.failure.done() else None

    return asyncio.run(main())


FINISH = Finish(code=0, reason="r")


def test_records_are_in_the_log_before_any_effect(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    seen: list[list[str]] = []
    machine = Script([FINISH, LogRecord(kind="late", data={}), LogRecord(kind="later", data={})])
    failure = run(
        path,
        machine,
        Driver.start,
        lambda command: seen.append([event.kind for event in event_log.read(path).events]),
    )
    assert failure is None and seen == [["late", "later"]]


def test_a_slow_disk_holds_effects_and_events_back_and_not_the_loop(tmp_path: Path) -> None:
    """Regression: the controller's heartbeat waited for a flush of the disk, and the controller was deposed."""
    synced, path = threading.Event(), tmp_path / "events.jsonl"
    done: list[Command] = []

    def flush() -> None:
        synced.wait(10)

    machine = Script(
        [LogRecord(kind="one", data={}), FINISH], [LogRecord(kind="two", data={}), FINISH], [FINISH]
    )

    async def main() -> None:
        log = EventLog.open(path, "test")
        all_done = asyncio.Event()

        def execute(command: Command) -> None:
            done.append(command)
            if len(done) == 3:
                all_done.set()

        driver = Driver(machine, log, execute, flush)
        driver.start()
        driver.post(BEAT)
        driver.post(BEAT)
        await asyncio.sleep(0)
        assert [event.kind for event in event_log.read(path).events] == ["one"] and not done
        synced.set()
        await all_done.wait()
        driver.close()
        log.close()

    asyncio.run(asyncio.wait_for(main(), 10))
    assert [event.kind for event in event_log.read(path).events] == ["one", "two"] and machine.events == [
        BEAT,
        BEAT,
    ]


def test_a_disk_that_is_gone_is_a_failure(tmp_path: Path) -> None:
    def gone() -> None:
        raise OSError("gone")

    async def main() -> BaseException | None:
        log = EventLog.open(tmp_path / "events.jsonl", "test")
        driver = Driver(Script([LogRecord(kind="one", data={}), FINISH]), log, lambda command: None, gone)
        driver.start()
        await asyncio.wait({driver.failure}, timeout=10)
        log.close()
        return driver.failure.exception()

    assert isinstance(asyncio.run(main()), OSError)


def test_timers_replace_each_other_and_are_cancelled(tmp_path: Path) -> None:
    machine = Script(
        [
            SetTimer(name="a", delay_s=30.0),
            SetTimer(name="a", delay_s=0.02),
            SetTimer(name="b", delay_s=0.01),
            CancelTimer(name="b"),
        ],
        [FINISH],
    )
    assert run(tmp_path / "log", machine, Driver.start, lambda command: None) is None
    assert machine.events == [Tick(name="a")]


@pytest.mark.parametrize("again", [SetTimer(name="a", delay_s=30.0), CancelTimer(name="a")])
@pytest.mark.parametrize("fires_first", [False, True])
def test_a_timer_gives_no_tick_after_the_machine_has_set_it_again_or_cancelled_it(
    tmp_path: Path, again: Command, fires_first: bool
) -> None:
    """The old timer fires while the journal is synced, or while its tick waits behind the event that sets it again.

    The new limit of a controller ended with the tick of the old one, and a rank that had no order yet was killed.
    """
    synced = threading.Event()
    wait = LogRecord(kind="wait", data={})
    rank = LogRecord(kind="rank", data={})
    machine = Script([SetTimer(name="a", delay_s=0.02)], [wait, FINISH], [rank, FINISH, again], [])

    def flush() -> None:
        synced.wait(10)

    async def main() -> None:
        log = EventLog.open(tmp_path / "events.jsonl", "test")
        acted: asyncio.Queue[Command] = asyncio.Queue()
        driver = Driver(machine, log, acted.put_nowait, flush)
        driver.start()
        driver.post(BEAT)  # the journal is synced now
        if fires_first:
            driver.post(BEAT)
            await asyncio.sleep(0.1)  # the tick waits behind the event
        else:
            synced.set()
            await acted.get()
            synced.clear()
            driver.post(BEAT)
            await asyncio.sleep(0.1)  # the old time is over during this sync
        synced.set()
        for _ in range(2 if fires_first else 1):
            await acted.get()
        driver.post(BEAT)
        driver.close()
        log.close()

    asyncio.run(asyncio.wait_for(main(), 10))
    assert machine.events == [BEAT, BEAT, BEAT]


def test_an_event_posted_by_an_effect_comes_after_all_effects(tmp_path: Path) -> None:
    order: list[str] = []
    machine = Script([Finish(code=1, reason="one"), FINISH], [])
    drivers: list[Driver] = []

    def body(driver: Driver) -> None:
        drivers.append(driver)
        driver.start()

    def execute(command: Command) -> None:
        assert isinstance(command, Finish)
        order.append(command.reason)
        if command.reason == "one":
            drivers[0].post(BEAT)
            order.append("posted")
            assert machine.events == []

    with pytest.raises(asyncio.InvalidStateError):
        raise run(tmp_path / "log", machine, body, execute) or AssertionError("the second Finish must fail")
    assert order == ["one", "posted", "r"]


def test_a_broken_machine_executor_or_callback_is_a_failure(tmp_path: Path) -> None:
    def explode(command: Command) -> None:
        raise InternalError("no such effect")

    broken = run(tmp_path / "a", Script([FINISH]), Driver.start, explode)
    assert isinstance(broken, InternalError)
    assert isinstance(run(tmp_path / "b", Script(), Driver.start, explode), IndexError)

    def later(driver: Driver) -> None:
        asyncio.get_running_loop().call_soon(lambda: 1 // 0)

    assert isinstance(run(tmp_path / "c", Script(), later, explode), ZeroDivisionError)

    async def work() -> None:
        raise OSError("no space left")

    def beside(driver: Driver) -> None:
        watched(work(), driver.fail)

    assert isinstance(run(tmp_path / "d", Script(), beside, explode), OSError)


def test_a_connection_that_cannot_be_accepted_is_no_failure(tmp_path: Path) -> None:
    """Regression: asyncio reports such connections like defects, so any process could end the daemon with them."""
    said: list[str] = []

    def full(driver: Driver) -> None:
        loop = asyncio.get_running_loop()
        error = OSError(errno.EMFILE, "Too many open files")
        loop.call_exception_handler({"message": "socket.accept() out of system resource", "exception": error})
        said.append("on")
        driver.start()

    assert run(tmp_path / "log", Script([FINISH]), full, lambda command: None) is None and said == ["on"]
