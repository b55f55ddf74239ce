"""The processes of a node with a real zygote that is stopped, lost, or has forked without a report."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from holdfast import event_log
from holdfast.core.ids import Generation, MemberId
from holdfast.core.protocol.messages import Assignment, MemberStarted
from holdfast.core.protocol.status_page import Word
from holdfast.event_log import EventLog
from holdfast.runtime.agent import exiting_processes, worker_processes
from holdfast.runtime.agent.agent_events import MemoryFreed, PartFailed, ProcessEvent, ProcessGone
from holdfast.runtime.agent.exiting_processes import ExitingProcesses
from holdfast.runtime.agent.worker_processes import Processes
from holdfast.runtime.agent.zygote import device_in_use
from holdfast.runtime.net.channel import Channel, Hub
from holdfast.runtime.net.service_names import zygote_of
from holdfast.runtime.node.run_processes import sweep
from holdfast.runtime.node.run_settings import RunSettings
from holdfast.runtime.node.rundir import RunDir
from holdfast.runtime.node.spawn import ZYGOTE_MESSAGES, SpawnOrder, ZygoteMessage
from holdfast.runtime.node.status_page import Page
from tests.runtime.runs import BOUND_S, exists, without_torch

pytestmark = pytest.mark.processes

STOPS_AFTER_FORK = """
import os, signal, sys
zygote = sys.modules["__main__"].Zygote
tell = zygote._tell
def stop_and_tell(self, message):
    if type(message).__name__ == "Spawned":
        os.kill(os.getpid(), signal.SIGSTOP)
    tell(self, message)
zygote._tell = stop_and_tell
"""
"""A module for the zygote to preload: it stops itself when it has forked, before it answers."""


class Node:
    """The processes of one node, and the reports on them."""

    def __init__(self, where: Path, preload: tuple[str, ...] = ()) -> None:
        self.run = RunDir(where / "run")
        self.run.create()
        (where / "train.py").write_text("import time\ntime.sleep(600)\n")
        self.settings = RunSettings(
            run_id="t", target=str(where / "train.py"), nproc=4, env=without_torch(where), preload=preload
        )
        self.settings.save(self.run.path)
        self.journal = EventLog.open(self.run.journal, "test")
        self.started: dict[int, int] = {}
        self.exited: list[tuple[int, int, int | None]] = []  # member, pid, signal
        self.failures: list[BaseException] = []
        self.procs = Processes(self.run, self.settings, self.journal, self._post)

    def _post(self, event: ProcessEvent) -> None:
        match event:
            case MemberStarted():
                self.started[event.member_id] = event.pid
            case ProcessGone():
                self.exited.append((event.member_id, event.pid, event.killed_by))
            case PartFailed():
                self.failures.append(event.error)

    def order(self, member_id: int) -> None:
        """Order the start of one member."""
        seat = Assignment(MemberId(member_id), member_id, member_id)
        self.procs.start(SpawnOrder(seat, Generation(1, 1), 4, 0, 0, "", False, "", 29500))

    def said(self, kind: str) -> list[dict[str, Any]]:
        """Return the data of the records of a kind."""
        return [dict(event.data) for event in event_log.read(self.run.journal).events if event.kind == kind]

    def zygote(self) -> int:
        """Return the process id of the connected zygote."""
        endpoint = self.run.read_endpoint("zygote")
        assert endpoint is not None
        return endpoint.pid

    async def ready(self, count: int = 1) -> int:
        """Return the process id of the zygote, once it is the ``count``-th that can fork."""
        self.procs.want_zygote()
        await until(lambda: len(self.said("zygote_ready")) == count)
        return self.zygote()

    async def recorded(self, member_id: int) -> int:
        """Return the process id that a worker has written into its page."""
        page = Page.open(self.run.page_path(MemberId(member_id)))
        await until(lambda: page[Word.PID])
        pid = page[Word.PID]
        page.close()
        return pid


async def until(condition: Callable[[], object]) -> None:
    """Let the loop run until ``condition()`` is true."""
    deadline_s = time.monotonic() + BOUND_S
    while not condition():
        assert time.monotonic() < deadline_s
        await asyncio.sleep(0.01)


@asynccontextmanager
async def running(where: Path, *preload: str) -> AsyncIterator[Node]:
    """Yield a node, and end all its processes whatever its zygote does."""
    node = Node(where, preload)
    try:
        yield node
        async with asyncio.timeout(BOUND_S):
            await node.procs.end(kill=True)
        assert not node.failures
    finally:
        sweep(node.run)
        node.run.remove_pages()
        node.journal.close()


def test_a_stopped_zygote_is_given_up_and_the_next_one_forks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        async with running(tmp_path) as node:
            first = await node.ready()
            node.order(1)
            await until(lambda: 1 in node.started)
            os.kill(first, signal.SIGSTOP)
            with monkeypatch.context() as patch:
                patch.setattr(worker_processes, "ANSWER_S", 0.1)
                node.order(2)
                await until(lambda: node.exited)
            assert node.exited == [(2, 0, None)]
            await node.ready(2)
            assert not exists(first)
            node.order(3)
            await until(lambda: 3 in node.started)
            assert sorted(node.started) == [1, 3] and exists(node.started[1])

    asyncio.run(scenario())


def test_a_zygote_that_answers_is_not_given_up(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path) as node:
            await node.ready()
            node.order(1)
            node.order(2)
            await until(lambda: len(node.started) == 2)
            assert node.procs._silence is None

    asyncio.run(scenario())


def test_a_member_that_is_killed_before_it_was_forked_has_exited_and_its_late_fork_dies(
    tmp_path: Path,
) -> None:
    async def scenario() -> None:
        async with running(tmp_path) as node:
            zygote = await node.ready()
            os.kill(zygote, signal.SIGSTOP)
            node.order(1)
            node.procs.kill(MemberId(1))
            assert node.exited == [(1, 0, None)]
            node.order(1)  # a repeated order: the member may not start again
            os.kill(zygote, signal.SIGCONT)
            await until(lambda: node.said("ghost_killed"))
            ghost = node.said("ghost_killed")[0]
            await until(lambda: not exists(ghost["pid"]))
            assert ghost["member"] == 1 and not node.started and zygote == node.zygote()

    asyncio.run(scenario())


def test_a_member_that_is_killed_while_the_zygote_imports_never_starts(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path) as node:
            node.order(1)
            node.order(2)
            node.procs.kill(MemberId(1))
            assert node.exited == [(1, 0, None)]
            await until(lambda: node.started)
            node.order(3)
            await until(lambda: 3 in node.started)
            assert sorted(node.started) == [2, 3]

    asyncio.run(scenario())


def test_the_end_does_not_wait_for_a_stopped_zygote(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path) as node:
            zygote = await node.ready()
            node.order(1)
            await until(lambda: node.started)
            os.kill(zygote, signal.SIGSTOP)
            node.order(2)
        assert not exists(zygote) and not exists(node.started[1])

    asyncio.run(scenario())


def test_a_worker_that_said_hello_before_its_zygote_did_outlives_it(tmp_path: Path) -> None:
    (tmp_path / "stub").mkdir()
    (tmp_path / "stub" / "mute.py").write_text(STOPS_AFTER_FORK)

    async def scenario() -> None:
        async with running(tmp_path, "mute") as node:
            zygote = await node.ready()
            node.order(1)
            pid = await node.recorded(1)
            node.procs.adopt(MemberId(1), pid)
            node.order(2)
            os.kill(zygote, signal.SIGKILL)
            await until(lambda: node.exited)
            assert node.exited == [(2, 0, None)] and node.started == {1: pid} and exists(pid)
            node.procs.kill(MemberId(1))
            await until(lambda: len(node.exited) == 2)
            assert node.exited[1][:2] == (1, pid)

    asyncio.run(scenario())


def test_a_zygote_that_is_lost_as_soon_as_it_is_found_is_replaced(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path) as node:
            async with hangs_up(node.run, times=5):
                node.order(1)
                await until(lambda: node.started)
            assert len(node.said("zygote_lost")) == 5

    asyncio.run(scenario())


@asynccontextmanager
async def hangs_up(run: RunDir, times: int) -> AsyncIterator[None]:
    """Simulate the zygote of a run that shakes hands and disconnects, ``times`` times, and then is gone."""
    found = []

    def opened(channel: Channel[ZygoteMessage]) -> None:
        found.append(channel)
        if len(found) == times:
            run.endpoint_path("zygote").unlink()
        channel.close()

    hub: Hub[ZygoteMessage] = Hub(
        ZYGOTE_MESSAGES,
        run.secret(),
        on_open=opened,
        on_message=lambda channel, message: None,
        on_close=lambda channel: None,
    )
    server, at = await hub.listen(zygote_of("node0"), run.socket_of("zygote"))
    run.write_endpoint("zygote", at)
    async with server:
        yield


DRIVER_IN_USE = """
import sys
zygote = sys.modules["__main__"]
zygote.DRIVERS = (__file__,)
device = open(__file__)
"""
"""A module that opens the driver of a device at its import (a file stands for it)."""


def test_a_zygote_whose_imports_hold_a_device_is_not_forked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The forks of such a zygote could not use the device, so every worker would fail with the same error."""
    (tmp_path / "opens_device.py").write_text(DRIVER_IN_USE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)

    async def scenario() -> None:
        async with running(tmp_path, "opens_device") as node:
            node.order(1)
            await until(lambda: 1 in node.started)
            (unusable,) = node.said("zygote_unusable")
            assert "opens_device.py: a fork could not use the device" in str(unusable["reason"])
            await until(lambda: node.procs._zygote is None)  # the device is free again
            node.order(2)
            await until(lambda: 2 in node.started)
            assert len(node.said("zygote_ready")) == 1

    asyncio.run(scenario())


STARTS_A_THREAD = """
import threading, time
from pathlib import Path

def stay():
    Path(f"/proc/self/task/{threading.get_native_id()}/comm").write_text(NAME)
    named.set()
    time.sleep(600)

named = threading.Event()
threading.Thread(target=stay, daemon=True).start()
named.wait()
"""
"""A module that starts a thread at its import."""


@pytest.mark.parametrize(("name", "forks"), [("worker", False), ("jemalloc_bg_thd", True)])
def test_a_zygote_whose_imports_start_a_thread_is_forked_only_where_that_is_safe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, forks: bool
) -> None:
    """Regression: the zygote refused each fork without a message, so a module for faster starts made them slower."""
    (tmp_path / "starts_thread.py").write_text(f"NAME = {name!r}\n{STARTS_A_THREAD}")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)

    async def scenario() -> None:
        async with running(tmp_path, "starts_thread") as node:
            node.order(1)
            await until(lambda: 1 in node.started)
            told = [str(unusable["reason"]) for unusable in node.said("zygote_unusable")]
            assert told == (
                [] if forks else ["starts_thread starts 1 thread at its import: a fork could hang"]
            )
            assert node.said("zygote_refused") == []

    asyncio.run(scenario())


def test_a_fork_is_refused_for_the_files_and_the_state_of_a_driver(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number, place in enumerate(["/dev/null", "/dev/nvidiactl", "/dev/nvidia0"]):
        (tmp_path / str(number)).symlink_to(place)
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    assert device_in_use(tmp_path) == "", "NVML alone leaves a fork able to use CUDA"
    (tmp_path / "7").symlink_to("/dev/nvidia-uvm")
    assert "/dev/nvidia-uvm" in device_in_use(tmp_path)
    cuda = SimpleNamespace(is_initialized=lambda: True)
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
    assert "initialised CUDA" in device_in_use(tmp_path)


def test_a_handler_may_kill_and_start_members_inside_the_post(tmp_path: Path) -> None:
    """The state machine does both: it kills a member that was given up, and starts its replacement at its end."""
    handled: list[tuple[str, int, str]] = []

    class Owner(Node):
        def _post(self, event: ProcessEvent) -> None:
            assert not isinstance(event, PartFailed)
            kind = type(event).__name__
            handled.append((kind, event.member_id, "begins"))
            super()._post(event)
            if isinstance(event, MemberStarted):
                self.procs.kill(event.member_id)
            elif event.member_id == 1:
                self.procs.adopt(MemberId(2), second.pid, second)
            handled.append((kind, event.member_id, "ends"))

    async def scenario() -> None:
        node = Owner(tmp_path)
        try:
            node.procs.adopt(MemberId(1), first.pid, first)
            await until(lambda: len(node.exited) == 2)
            await node.procs.end(kill=True)
        finally:
            node.run.remove_pages()
            node.journal.close()
        assert node.exited == [(1, first.pid, signal.SIGKILL), (2, second.pid, signal.SIGKILL)]

    sleep = ["sleep", "600"]
    with (
        subprocess.Popen(sleep, start_new_session=True) as first,
        subprocess.Popen(sleep, start_new_session=True) as second,
    ):
        try:
            asyncio.run(scenario())
        finally:
            first.kill()
            second.kill()
    started, gone = ("MemberStarted", "ProcessGone")
    assert handled == [
        (started, 1, "begins"), (started, 1, "ends"),
        (gone, 1, "begins"), (started, 2, "begins"), (started, 2, "ends"), (gone, 1, "ends"),
        (gone, 2, "begins"), (gone, 2, "ends"),
    ]  # fmt: skip


def test_a_worker_starts_when_the_one_before_it_is_gone_or_its_end_stands_still(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The end of a process with much device memory takes long. Until then, the newcomer would find a full device."""
    looks, gone = itertools.count(), False

    def left(pid: int) -> tuple[int, int, int] | None:
        if pid == 2:
            return 1, 0, 7  # its end makes no progress
        return None if gone else (1, 0, next(looks))

    monkeypatch.setattr(exiting_processes, "END_STILL_S", 0.01)
    monkeypatch.setattr(exiting_processes, "left_of", left)

    async def scenario() -> None:
        nonlocal gone
        freed: list[MemoryFreed] = []
        held = ExitingProcesses(freed.append)
        held.add(1)
        held.add(2)
        await until(lambda: held.pids == (1,))
        seen = next(looks)
        await until(lambda: next(looks) > seen + 10)
        assert held.pids == (1,) and not freed
        gone = True
        await until(lambda: not held)
        assert freed == [MemoryFreed()]

    asyncio.run(scenario())
