"""Processes by their number: one that ends between the look and the signal, and numbers that are no process."""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Iterator

import pytest

from holdfast.runtime.pids import alive, command, kill_if, pidfd

pytestmark = pytest.mark.processes


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    """A process that does nothing."""
    with subprocess.Popen(["sleep", "600"]) as process:
        yield process
        process.kill()


def test_only_what_is_ours_is_killed(sleeper: subprocess.Popen[bytes]) -> None:
    assert not kill_if(sleeper.pid, lambda pid: False) and alive(sleeper.pid)
    assert kill_if(sleeper.pid, lambda pid: command(pid) == [b"sleep", b"600", b""])
    assert sleeper.wait() == -9


def test_one_that_ends_after_the_look_gets_no_signal(sleeper: subprocess.Popen[bytes]) -> None:
    def ours(pid: int) -> bool:
        sleeper.kill()
        return sleeper.wait() != 0  # reaped: its number is free, another process may have it by now

    assert not kill_if(sleeper.pid, ours)
    assert command(sleeper.pid) == []


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
