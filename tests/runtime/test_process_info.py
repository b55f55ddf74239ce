"""Processes by their id: one that ends between the look and the signal, and ids without a process."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.runtime.node import process_info
from holdfast.runtime.node.process_info import (
    age_s,
    alive,
    await_end,
    command,
    kill_group,
    kill_if,
    left_of,
    pidfd,
    start_ticks,
)
from tests.runtime.runs import no_descriptor

pytestmark = pytest.mark.processes
NO_PROCESS = 2**22 + 1  # the kernel assigns no such id


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    """Yield a process that does nothing."""
    with subprocess.Popen(["sleep", "600"]) as process:
        # the program runs, but the kernel may not have stored its command line yet
        while not command(process.pid)[0]:
            time.sleep(0.001)
        yield process
        process.kill()


def test_only_what_is_ours_is_killed(sleeper: subprocess.Popen[bytes]) -> None:
    assert not kill_if(sleeper.pid, lambda pid: False) and alive(sleeper.pid)
    assert kill_if(sleeper.pid, lambda pid: command(pid) == [b"sleep", b"600", b""])
    assert sleeper.wait() == -9


def test_a_process_is_not_gone_where_no_descriptor_is_left(sleeper: subprocess.Popen[bytes]) -> None:
    """Regression: a rank without a free descriptor took its living peers for lost ones."""
    started = start_ticks(sleeper.pid)
    with no_descriptor():
        for ask in (alive, start_ticks):
            with pytest.raises(OSError, match="Too many open files"):
                ask(sleeper.pid)
        assert left_of(sleeper.pid) is None and age_s(sleeper.pid) == 0
    assert alive(sleeper.pid) and start_ticks(sleeper.pid) == started


def test_one_that_ends_after_the_look_gets_no_signal(sleeper: subprocess.Popen[bytes]) -> None:
    def ours(pid: int) -> bool:
        sleeper.kill()
        return sleeper.wait() != 0  # reaped: another process may have its id by now

    assert not kill_if(sleeper.pid, ours)
    assert command(sleeper.pid) == []


def test_the_age_of_a_process(sleeper: subprocess.Popen[bytes]) -> None:
    first = age_s(sleeper.pid)
    time.sleep(0.2)
    assert 0.1 < age_s(sleeper.pid) - first
    assert age_s(os.getpid()) > age_s(sleeper.pid) > 0 == age_s(NO_PROCESS)


def test_numbers_that_are_no_process() -> None:
    over = threading.Event()
    thread = threading.Thread(target=over.wait)
    thread.start()
    try:
        assert [pidfd(number) for number in (thread.native_id or 0, 0, -7)] == [-1, -1, -1]
        assert not kill_if(thread.native_id or 0, lambda pid: True)
    finally:
        over.set()
        thread.join()


SHARING = """
import multiprocessing, pathlib, time
from multiprocessing.resource_tracker import _resource_tracker, ensure_running
from multiprocessing.shared_memory import SharedMemory
ensure_running()
while not pathlib.Path(f"/proc/{_resource_tracker._pid}/cmdline").read_bytes():
    time.sleep(0.001)
memory = SharedMemory(create=True, size=64)
gate = multiprocessing.get_context("spawn").Semaphore()
print(memory.name, "sem." + gate._semlock.name.lstrip("/"), flush=True)
time.sleep(600)
"""


def test_what_a_killed_group_shares_is_removed_by_its_own_tracker() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", SHARING], stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        assert process.stdout is not None
        places = [Path("/dev/shm") / name for name in process.stdout.readline().split()]
        assert len(places) == 2 and all(place.exists() for place in places)
        process.kill()
        kill_group(process.pid)
    deadline_s = time.monotonic() + 20
    while any(place.exists() for place in places) and time.monotonic() < deadline_s:
        time.sleep(0.02)
    assert not any(place.exists() for place in places)


def test_the_end_of_a_process_is_awaited_as_long_as_it_makes_progress(
    sleeper: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not await_end(sleeper.pid, still_s=0.01, most_s=60.0), "it stands still"
    looks = 0

    def left(pid: int) -> tuple[int, int, int]:
        nonlocal looks
        looks += 1
        if looks == 10:
            sleeper.kill()
        return 1, 0, looks

    monkeypatch.setattr(process_info, "left_of", left)
    assert not await_end(sleeper.pid, still_s=0.01, most_s=0.03), "not for ever"
    assert await_end(sleeper.pid, still_s=0.05, most_s=60.0) and looks >= 10
    monkeypatch.undo()
    sleeper.wait()
    assert left_of(sleeper.pid) is None and await_end(sleeper.pid, 60.0, 60.0)
