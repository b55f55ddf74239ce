"""A death is reported when it begins: the lock of a worker's page passes on before the kernel has freed its memory."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from holdfast.runtime.node.death_watch import listen
from holdfast.runtime.node.process_info import alive, ending
from holdfast.runtime.node.status_page import Page
from tests.runtime.runs import Run, until

pytestmark = pytest.mark.processes

HOLDER = """
import os, sys, threading, time
from pathlib import Path
from holdfast.runtime.node.death_watch import hold

MEMORY = bytearray(b"x") * (256 * 2**20)
def kept():
    hold(Path(sys.argv[1]))
    print("ready", flush=True)
    sys.stdin.readline()
{then}
"""


@contextmanager
def holder(page: Path, then: str) -> Iterator[subprocess.Popen[str]]:
    """Yield a process that holds the lock of a page, reads one line, and then runs ``then``. Kill it at the end."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER.replace("{then}", then), str(page)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    with process:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        try:
            yield process
        finally:
            process.kill()


class Heard:
    """The knowledge of a listener about a process at the moment of the report."""

    def __init__(self, page: Path, pid: int) -> None:
        self.event = threading.Event()
        self.code: int | None = None
        self.was_alive = False
        self._pid = pid
        listen(page, self._told)

    def _told(self) -> None:
        self.code, self.was_alive = ending(self._pid), alive(self._pid)
        self.event.set()


@pytest.fixture
def page(tmp_path: Path) -> Path:
    Page.create(tmp_path / "page-1").close()
    return tmp_path / "page-1"


def go(process: subprocess.Popen[str]) -> None:
    """Let a holder continue."""
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


def test_a_kill_is_told_with_its_signal_before_the_process_is_gone(page: Path) -> None:
    early = 0
    for _ in range(5):
        with holder(page, "kept()") as process:
            heard = Heard(page, process.pid)
            process.kill()
            assert heard.event.wait(30)
            early += heard.was_alive and heard.code == -signal.SIGKILL
        assert ending(process.pid) is None
    # The kernel takes milliseconds to free the memory. Another process may get the processor in some of the trials.
    assert early


def test_an_exit_is_told_with_its_code(page: Path) -> None:
    codes = []
    for _ in range(5):
        with holder(page, "kept(); os._exit(7)") as process:
            heard = Heard(page, process.pid)
            go(process)
            assert heard.event.wait(30) and process.wait() == 7
            codes.append(heard.code)
    # As above: the process may be gone when the listener gets the processor.
    assert 7 in codes and set(codes) <= {7, None}


def test_several_listeners_and_a_late_one_are_told(page: Path) -> None:
    with holder(page, "kept()") as process:
        heard = [Heard(page, process.pid) for _ in range(3)]
    assert all(one.event.wait(30) for one in [*heard, Heard(page, process.pid)])


def test_exec_lets_go_but_is_no_end(page: Path) -> None:
    with holder(page, "kept(); os.execv('/bin/sleep', ['sleep', '600'])") as process:
        heard = Heard(page, process.pid)
        go(process)
        assert heard.event.wait(30) and heard.code is None and heard.was_alive


def test_a_forked_child_that_ends_tells_nothing(page: Path) -> None:
    then = "kept(); os.fork() or os._exit(1); os.wait(); print('on', flush=True); time.sleep(600)"
    with holder(page, then) as process:
        heard = Heard(page, process.pid)
        go(process)
        assert process.stdout is not None and process.stdout.readline() == "on\n"
        assert not heard.event.is_set()
    assert heard.event.wait(30)


def test_the_end_of_a_thread_is_no_end(page: Path) -> None:
    then = "t = threading.Thread(target=kept); t.start(); t.join(); time.sleep(600)"
    with holder(page, then) as process:
        heard = Heard(page, process.pid)
        go(process)
        assert heard.event.wait(30) and heard.code is None and heard.was_alive


def test_a_page_whose_lock_nobody_took_tells_nothing(page: Path) -> None:
    assert not Heard(page, os.getpid()).event.wait(0.2)


def test_a_script_that_puts_another_program_in_its_place_goes_on(tmp_path: Path) -> None:
    again = "os.execv(sys.executable, [sys.executable, __file__, 'again'])"
    script = f"import os, sys\nif len(sys.argv) == 1:\n    {again}\n"
    with Run(tmp_path, script, nproc=2) as run:
        run.start()
        assert run.wait() == 0, run.logs()


def test_a_worker_from_scratch_waits_until_the_dead_one_is_gone(tmp_path: Path) -> None:
    with Run(tmp_path, nproc=2, args=("100000",)) as run:
        run.start()
        pids = run.pids()
        os.kill(pids[0], signal.SIGKILL)
        again = until("started again", lambda: run.pids(1) if len(run.pids(1)) == 2 else None)
        assert not alive(pids[0]) and again[0] != pids[0]
