"""Shared memory of members that are gone: it does not pile up, and a lack of it is an ordinary fault."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import subprocess
import tempfile
from multiprocessing import process
from pathlib import Path

import pytest

from holdfast.core.ids import Generation, MemberId
from holdfast.core.protocol.status_page import FILE_SIZE_BYTES
from holdfast.runtime.agent.shm_cleanup import YOUNG_S, ShmCleanup
from holdfast.runtime.net.multiprocessing_sockets import remove_sockets_of, sockets_of, use_sockets_of
from holdfast.runtime.node.run_processes import recorded_members, sweep
from holdfast.runtime.node.rundir import OWNER, RunDir
from holdfast.runtime.node.stack_texts import stacks_path
from holdfast.runtime.node.status_page import Page
from tests.cli.command import HOLDFAST, clean_environment
from tests.runtime.runs import Run, without_torch


def test_the_dead_of_the_newest_recovery_stay_those_before_go(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    run.create()
    remains = ShmCleanup(run)
    try:
        for number in (1, 2, 3):
            member = MemberId(number)
            Page.create(run.page_path(member), member=number).close()
            stacks_path(run, member).touch()
            remains.add(member)
            for _ in range(2):  # every order may come twice
                remains.clear(Generation(1, number + 1))
        assert recorded_members(run) == [(3, 0)]
        assert sorted(path.name for path in run.pages().iterdir()) == ["page-3", OWNER, "stacks-3"]
    finally:
        run.remove_pages()


@pytest.mark.processes
def test_pages_do_not_pile_up_with_restarts(tmp_path: Path) -> None:
    with Run(tmp_path, nproc=2, args=("100000",), max_restarts=100) as run:
        run.start()
        for attempt in range(5):
            os.kill(run.pids(attempt)[attempt % 2], signal.SIGKILL)
        run.pids(attempt=5)
        recorded = {member for member, _ in recorded_members(run.dir)}
        assert recorded == {9, 10, 11, 12}, "those that live, and those that they replaced"
        run.stop()


@pytest.mark.processes
def test_no_room_for_a_page_is_a_fault_of_that_worker(tmp_path: Path) -> None:
    with Run(tmp_path, nproc=2, args=("100000",), max_restarts=10_000) as run:
        agent = run.start()
        pids = run.pids()
        unlimited = resource.prlimit(agent.pid, resource.RLIMIT_FSIZE)
        resource.prlimit(agent.pid, resource.RLIMIT_FSIZE, (FILE_SIZE_BYTES - 1, unlimited[1]))
        os.kill(pids[1], signal.SIGKILL)
        run.wait_event("detected", 2)
        resource.prlimit(agent.pid, resource.RLIMIT_FSIZE, unlimited)
        run.let_end()
        assert run.wait() == 0
        assert {e.data["code"] for e in run.events("member_exited")} >= {os.EX_CANTCREAT, 0}
        assert "no room for the status page" in run.logs()
        assert not run.events("agent_broken") and len(run.events("agent_started")) == 1


def age(directory: Path) -> None:
    """Set the time of a directory to a while ago."""
    then_s = directory.stat().st_mtime - 2 * YOUNG_S
    os.utime(directory, (then_s, then_s))


@pytest.mark.processes
def test_the_next_run_removes_what_killed_ones_have_left(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    (tmp_path / "train.py").write_text("pass")
    with (
        Run(tmp_path / "a", nproc=1, args=("100000",)) as lost,
        Run(tmp_path / "b", nproc=1, args=("100000",)) as living,
    ):
        for run in (lost, living):
            run.start()
            run.pids()
        lost.agents[0].kill()
        lost.agents[0].wait()
        sweep(lost.dir)
        places = [run.dir.pages() for run in (lost, living)]
        shutil.rmtree(lost.dir.path)
        for place in places:
            age(place)
        environment = clean_environment(without_torch(tmp_path))
        command = [HOLDFAST, "run", "train.py"]
        subprocess.run(command, cwd=tmp_path, env=environment, check=True, capture_output=True, timeout=60)
        assert [place.exists() for place in places] == [False, True]
        living.stop()


KILLED = """
import os, signal
from multiprocessing import Process, util

def work():
    open(util.get_temp_dir() + "/listener", "w").close()
    os.kill(os.getpid(), signal.SIGKILL)

if __name__ == "__main__":
    child = Process(target=work)
    child.start()
    child.join()
    print("child:", child.exitcode)
"""


@pytest.mark.processes
def test_killed_loader_workers_leave_no_directories(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(KILLED)
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    environment = clean_environment({**without_torch(tmp_path), "TMPDIR": str(scratch)})
    command = [HOLDFAST, "run", "--nproc-per-node", "2", "train.py"]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, check=True, capture_output=True, text=True, timeout=60
    )
    assert "child: -9" in done.stdout
    assert list(scratch.glob("pymp-*")) == []


def test_a_directory_of_sockets_that_others_can_enter_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    settings: dict[str, object] = {}
    monkeypatch.setattr(process.current_process(), "_config", settings)
    sockets_of(tmp_path).mkdir(mode=0o777)
    sockets_of(tmp_path).chmod(0o777)
    use_sockets_of(tmp_path)
    assert settings == {}
    remove_sockets_of(tmp_path)
    use_sockets_of(tmp_path)
    assert settings == {"tempdir": str(sockets_of(tmp_path))}
