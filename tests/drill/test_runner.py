"""Runs of a drill, seen from outside: which processes their end may kill, and which users may read their files."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.core.ids import Generation, MemberId
from holdfast.core.protocol.status_page import Word
from holdfast.drill.failure_excerpt import launcher_log
from holdfast.drill.fault_spec import InjectedFault
from holdfast.drill.runner import Runner, end, plan_path
from holdfast.runtime.node.rundir import write_private
from holdfast.runtime.node.status_page import Page
from tests.runtime.runs import LOOP, Run, until, without_torch

pytestmark = pytest.mark.processes


@pytest.fixture
def stranger() -> Iterator[subprocess.Popen[bytes]]:
    """Yield a process that belongs to no run."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        yield process
        process.kill()


def test_the_end_of_a_run_kills_its_processes_and_nobody_elses(
    tmp_path: Path, stranger: subprocess.Popen[bytes]
) -> None:
    launcher = subprocess.Popen([sys.executable, "-c", ""])
    launcher.wait()
    with Run(tmp_path, args=("100000",), nproc=2) as run:
        run.start()
        run.wait_log("rank 0")
        # Process ids that once belonged to this run.
        page = Page.create(
            run.dir.page_path(MemberId(99)), generation=Generation(1, 9).pack(), member=99, rank=1
        )
        page[Word.PID] = stranger.pid
        page.close()
        write_private(
            run.dir.endpoint_path("zygote"), b'{"host":"127.0.0.1","port":1,"pid":%d}' % stranger.pid
        )
        end(launcher, run.dir.path)
        until("none is left", lambda: not run.left())
        write_private(
            run.dir.endpoint_path("agent"), b'{"host":"127.0.0.1","port":1,"pid":%d}' % stranger.pid
        )
        end(launcher, run.dir.path)
    assert stranger.poll() is None


def test_what_a_run_leaves_is_private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in without_torch(tmp_path).items():
        monkeypatch.setenv(name, value)
    script = tmp_path / "train.py"
    script.write_text(LOOP)
    runner = Runner(tmp_path / "drill", 2, [str(script), "5"], lambda name, step, faults: None)
    runner.base.mkdir()
    outcome = runner.run("calm", faults=[InjectedFault("kill", (0,), 1000, "forward")])
    assert outcome.code == 0 and not outcome.injected
    for path in (launcher_log(outcome.directory), plan_path(outcome.directory)):
        assert path.stat().st_mode & 0o777 == 0o600, path
