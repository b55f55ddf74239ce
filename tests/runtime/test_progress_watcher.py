"""The processes and files that the agent inspects for progress."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.core.ids import MemberId, NodeId
from holdfast.core.protocol.health_messages import Late, Stalled
from holdfast.core.protocol.status_page import Phase, Word
from holdfast.core.watch.stall_detector import Limits
from holdfast.runtime.agent.agent_events import WatchEvent
from holdfast.runtime.agent.progress_watcher import LEARNED, Watcher
from holdfast.runtime.agent.worker_processes import WorkerProcess
from holdfast.runtime.node.hang_evidence import sample
from holdfast.runtime.node.process_info import age_s, kill_group, stopped, stopped_children
from holdfast.runtime.node.rundir import RunDir
from holdfast.runtime.node.status_page import Page
from tests.runtime.runs import no_file_beyond, until

DONE = MemberId(4)
LIMITS = Limits(factor=10.0, floor_s=1.0, start_s=2.0, idle_s=2.0, section_s=2.0, look_s=0.1)


def test_a_spare_that_waits_for_ever_is_no_hang(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    run.create()
    heard: list[WatchEvent] = []
    living: dict[MemberId, WorkerProcess] = {}
    watcher = Watcher(run, NodeId("node0"), LIMITS, living, (), heard.append)
    try:
        for number in (-7, 3):
            page = Page.create(run.page_path(MemberId(number)), member=number, rank=max(number - 3, -1))
            page[Word.PID] = 1
            page.place(0, Phase.SPARE if number < 0 else Phase.FORWARD)
            living[MemberId(number)] = WorkerProcess(MemberId(number), 1, -1, None)
            page.close()
            for now in range(100, 120):
                watcher.look(float(now))
            assert bool(heard) == (number == 3), "a worker that stands still is one"
    finally:
        for open_page in watcher._pages.values():
            open_page.close()
        run.remove_pages()


def test_where_nothing_can_be_kept_the_looks_go_on(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    run.create()
    heard: list[WatchEvent] = []
    living = {DONE: WorkerProcess(DONE, os.getpid(), -1, None)}
    watcher = Watcher(run, NodeId("node0"), LIMITS, living, (), heard.append)
    kept = watcher._learned = run.pages() / f"{LEARNED}node0"
    try:
        page = Page.create(run.page_path(DONE), member=DONE)
        page[Word.PID] = os.getpid()
        page.place(0, Phase.FORWARD)
        page.close()
        with no_file_beyond(0):
            for now in range(100, 120):
                watcher.look(float(now))
        assert heard and not kept.exists()
        watcher.look(120.0)
        assert kept.stat().st_size
    finally:
        for open_page in watcher._pages.values():
            open_page.close()
        run.remove_pages()


@pytest.mark.processes
@pytest.mark.parametrize("what", ["not entered", "its child", "spare"])
def test_a_stopped_process_is_late_wherever_it_is(tmp_path: Path, what: str) -> None:
    """The stopped process may have no record yet, may block other ranks, or may be a spare that blocks none."""
    run = RunDir(tmp_path / "run")
    run.create()
    member_id = MemberId(-7 if what == "spare" else 3)
    code = (
        "import subprocess, sys; print(subprocess.Popen(['sleep', '60']).pid, flush=True); sys.stdin.read()"
    )
    pipe = subprocess.PIPE
    heard: list[WatchEvent] = []
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=pipe, stdout=pipe, start_new_session=True
    ) as one:
        living = {each: WorkerProcess(each, one.pid, -1, None) for each in (member_id, DONE)}
        # The factor: a running process is not late, however fast the other process started.
        limits = Limits(factor=1e6, floor_s=1.0, start_s=100.0, look_s=0.1)
        watcher = Watcher(run, NodeId("node0"), limits, living, (), heard.append)
        try:
            Page.create(run.page_path(member_id), member=member_id).close()
            other = Page.create(run.page_path(DONE), member=DONE)
            other.place(9, Phase.FINISHED)
            other.close()
            assert one.stdout is not None
            child = int(one.stdout.readline())
            until("it reads", lambda: sample(one.pid).process == "S")
            for now in range(100, 160):
                watcher.look(float(now))
            assert not heard
            os.kill(child if what == "its child" else one.pid, signal.SIGSTOP)
            until("it is stopped", lambda: stopped(one.pid) or stopped_children({one.pid}))
            for now in range(160, 165):
                watcher.look(float(now))
        finally:
            kill_group(one.pid)
            for open_page in watcher._pages.values():
                open_page.close()
            run.remove_pages()
    late = [message for message in heard if isinstance(message, Late)]
    assert late and all((each.member_id, each.stopped) == (member_id, True) for each in late)
    told = [message.stopped for message in heard if isinstance(message, Stalled)]
    assert all(told) and bool(told) == (what != "spare"), "no rank waits for a spare"


@pytest.mark.processes
def test_a_newcomer_that_loops_is_late_though_nobody_saw_the_others_start(tmp_path: Path) -> None:
    """The agent could not look until the others trained."""
    run = RunDir(tmp_path / "run")
    run.create()
    heard: list[WatchEvent] = []
    with subprocess.Popen(["sleep", "60"]) as one:
        living = {each: WorkerProcess(each, one.pid, -1, None) for each in (MemberId(3), DONE)}
        watcher = Watcher(run, NodeId("node0"), LIMITS, living, (), heard.append)
        try:
            for member_id, phase in ((MemberId(3), Phase.STARTING), (DONE, Phase.ABORTED)):
                page = Page.create(run.page_path(member_id), member=member_id)
                page.place(0, phase)
                page.close()
            until("its age is known", lambda: age_s(one.pid) > 0)
            for now in range(100, 130):
                watcher.look(float(now))
        finally:
            one.kill()
            for open_page in watcher._pages.values():
                open_page.close()
            run.remove_pages()
    assert {(m.member_id, m.stopped) for m in heard if isinstance(m, Late)} == {(MemberId(3), False)}
