"""Requests to leave: what is in the way of the watching thread does not end it."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.session.signals import ExitWatch
from tests.runtime.runs import until


class Watched:
    """A watch over this process, and what it was asked."""

    def __init__(self, exit_file: Path | None = None) -> None:
        self.asked: list[str] = []
        self.watch = ExitWatch(self.asked.append, exit_file, None, lambda: None)


@pytest.fixture
def full_pipe() -> Iterator[int]:
    """Where somebody else lets the interpreter write signals, and reads none."""
    read, write = os.pipe2(os.O_NONBLOCK)
    with pytest.raises(BlockingIOError):
        while True:
            os.write(write, bytes(4096))
    before = signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    handlers = {number: signal.signal(number, lambda *_: None) for number in (signal.SIGTERM, signal.SIGUSR2)}
    yield write
    for number, handler in handlers.items():
        signal.signal(number, handler)
    signal.set_wakeup_fd(before)
    os.close(read)
    os.close(write)


def test_a_wake_up_pipe_of_others_that_is_full_hides_no_signal(full_pipe: int) -> None:
    here = Watched()
    here.watch.start()
    try:
        os.kill(os.getpid(), signal.SIGTERM)
        until("told", lambda: here.asked == ["SIGTERM"])
        os.kill(os.getpid(), signal.SIGUSR2)
        until("told again", lambda: here.asked == ["SIGTERM", "SIGUSR2"])
    finally:
        here.watch.stop()
    assert signal.set_wakeup_fd(full_pipe) == full_pipe


def test_an_exit_file_that_cannot_be_read_is_warned_of_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "exit.json"
    path.symlink_to(path)
    here = Watched(path)
    here.watch.start()
    try:
        until("warned", lambda: caplog.records)
        path.unlink()
        path.write_text('{"GracefulExit": 1}')
        until("asked", lambda: here.asked)
    finally:
        here.watch.stop()
    assert here.asked == [f"file {path}"]
    assert len(caplog.records) == 1 and "cannot read the exit file" in caplog.text
