"""Stacks of a running worker: reading them must not end it."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from holdfast.runtime.node.hang_evidence import ask_for_stacks
from holdfast.runtime.node.stack_texts import MAIN, is_complete, where

pytestmark = pytest.mark.processes

LOOKS = 400
ANSWER_S_MAX = 10.0
BUSY = """
import sys, threading
from pathlib import Path
from holdfast.runtime.node.hang_evidence import offer_stacks
from holdfast.runtime.node.status_page import Page

def work():
    sum(range(50))

def wait(over):
    over.wait()

page = Page.create(Path(sys.argv[1]) / "page")
offer_stacks(Path(sys.argv[1]) / "stacks", page)
over = threading.Event()
waiting = threading.Thread(target=wait, args=(over,), name="the waiting one")
waiting.start()
print("ready", flush=True)
while not (Path(sys.argv[1]) / "over").exists():
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
over.set()
"""


def test_a_look_at_a_worker_that_starts_threads_does_not_end_it(tmp_path: Path) -> None:
    """Regression: reading the stacks of all threads was a segmentation fault once in some hundred reads."""
    stacks = tmp_path / "stacks"
    with subprocess.Popen(
        [sys.executable, "-c", BUSY, str(tmp_path)], stdout=subprocess.PIPE, text=True
    ) as worker:
        assert worker.stdout is not None and worker.stdout.readline() == "ready\n"
        for _ in range(LOOKS):
            if worker.poll() is not None:
                break
            written = stacks.stat().st_size
            ask_for_stacks(worker.pid)
            # One look at a time: the signals are queued, and many nested handlers need too much stack.
            until_s = time.monotonic() + ANSWER_S_MAX
            while stacks.stat().st_size == written and worker.poll() is None and time.monotonic() < until_s:
                time.sleep(0.0002)
        (tmp_path / "over").touch()
        assert worker.wait(30) == 0
    text = stacks.read_text()
    for look in text.split(MAIN)[1:]:
        assert is_complete(MAIN + look) and "<module>" in where(MAIN + look)
    assert "Thread the waiting one (most recent call first):" in text and "in wait" in text
