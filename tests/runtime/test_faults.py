"""Real processes killed from outside: worker, controller, agent, zygote, launcher."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.core.protocol.messages import ExitRun, StopRun
from holdfast.exit_codes import Exit
from holdfast.runtime.node.agent_client import AgentLink
from tests.runtime.runs import BOUND_S, LOOP, Run, exists, until

pytestmark = pytest.mark.processes
ON = ("100000",)
"""Steps of a loop that the test ends when it has seen what it is about."""


@pytest.mark.parametrize("zygote", [True, False])
def test_an_ordinary_run_leaves_nothing_behind(tmp_path: Path, zygote: bool) -> None:
    with Run(tmp_path, args=("3",), zygote=zygote) as run:
        run.start()
        pids = run.pids()
        assert run.wait() == 0
        assert [run.log(rank).splitlines()[-1] for rank in range(4)] == ["done"] * 4
        assert [e.data["code"] for e in run.events("member_exited")] == [0, 0, 0, 0]
        assert len(run.events("zygote_ready")) == (1 if zygote else 0)
        assert run.nothing_left() and not any(exists(pid) for pid in pids.values())


@pytest.mark.parametrize("zygote", [True, False])
def test_a_killed_worker_is_seen_with_its_page_and_all_restart(tmp_path: Path, zygote: bool) -> None:
    with Run(tmp_path, args=ON, zygote=zygote) as run:
        run.start()
        pids = run.pids()
        run.wait_log("rank 2", rank=2)
        os.kill(pids[2], signal.SIGKILL)
        dead = run.wait_event("member_exited").data
        assert (dead["rank"], dead["signal"], dead["code"]) == (2, 9, None)
        again = run.pids(attempt=1)
        assert not set(again.values()) & set(pids.values())
        run.let_end()
        assert run.wait() == 0
        assert run.log(2, attempt=1).endswith("done\n") and run.nothing_left()


def test_a_killed_controller_is_replaced_and_disturbs_nobody(tmp_path: Path) -> None:
    with Run(tmp_path, args=ON) as run:
        run.start()
        pids = run.pids()
        os.kill(int(run.wait_event("controller_started").data["pid"]), signal.SIGKILL)
        assert run.wait_event("controller_started", 2).data["term"] == 2
        run.let_end()
        assert run.wait() == 0
        assert len(run.events("generation_started")) == 1 and len(pids) == 4
        assert run.nothing_left()


@pytest.mark.parametrize(
    ("request_", "code"),
    [(ExitRun(grace_s=30.0, source="test"), Exit.UNSAVED), (StopRun(reason="test"), Exit.INTERRUPTED)],
)
def test_a_request_that_a_killed_controller_never_read_is_kept(
    tmp_path: Path, request_: ExitRun | StopRun, code: Exit
) -> None:
    with Run(tmp_path, args=("600",)) as run:
        run.start()
        run.pids()
        run.wait_log("rank 0")
        controller = int(run.wait_event("controller_started").data["pid"])
        os.kill(controller, signal.SIGSTOP)
        assert AgentLink(run.dir.path).request(request_).ok
        os.kill(controller, signal.SIGKILL)
        assert run.wait() == code and run.nothing_left()


def test_a_controller_that_cannot_be_started_is_tried_again(tmp_path: Path) -> None:
    with Run(tmp_path, args=ON) as run:
        run.start()
        run.pids()
        log = run.dir.path / "controller.log"
        log.rename(log.with_name("controller.log.before"))
        log.mkdir()
        os.kill(int(run.wait_event("controller_started").data["pid"]), signal.SIGKILL)
        assert "controller.log" in str(run.wait_event("controller_unreachable", 2).data["error"])
        log.rmdir()
        run.wait_event("controller_started", 2)
        run.let_end()
        assert run.wait() == 0 and len(run.events("generation_started")) == 1
        assert run.nothing_left()


WRITER = "import sys; sys.stdin.read()"


def test_workers_that_cannot_be_started_after_a_writer_has_ended_end_the_agent(tmp_path: Path) -> None:
    with Run(tmp_path, args=ON, zygote=False) as run:
        first = run.start()
        pids = run.pids()
        run.wait_log("rank 2", rank=2)
        env = {**os.environ, "HOLDFAST_RUN_DIR": str(run.dir.path)}
        words = [sys.executable, "-c", WRITER, "holdfast.store.write.writer_process"]
        with subprocess.Popen(words, env=env, stdin=subprocess.PIPE) as writer:
            in_the_way = run.dir.path / "attempt-001"
            in_the_way.touch()
            os.kill(pids[2], signal.SIGKILL)
            run.wait_event("generation_started", 2)
            writer.communicate()
        assert "attempt-001" in str(run.wait_event("agent_broken").data["error"])
        assert first.wait(BOUND_S) != 0
        in_the_way.unlink()
        run.start()
        run.let_end()
        assert run.wait() == 0 and run.nothing_left()


def test_a_successor_agent_adopts_the_living_workers(tmp_path: Path) -> None:
    with Run(tmp_path, args=ON) as run:
        first = run.start()
        pids = run.pids()
        run.wait_log("rank 0")
        first.kill()
        first.wait()
        assert all(exists(pid) for pid in pids.values())
        run.start()
        run.wait_event("agent_joined", 2)
        run.let_end()
        assert run.wait() == 0
        assert len(run.events("generation_started")) == 1
        assert [run.log(rank).count("member") for rank in range(4)] == [1, 1, 1, 1]
        assert run.nothing_left()


def test_a_worker_that_dies_while_there_is_no_agent_is_found_by_the_successor(tmp_path: Path) -> None:
    with Run(tmp_path, args=ON) as run:
        first = run.start()
        pids = run.pids()
        run.wait_log("rank 3", rank=3)
        first.kill()
        first.wait()
        os.kill(pids[3], signal.SIGKILL)
        run.start()
        assert run.wait_event("member_exited").data["rank"] == 3
        run.pids(attempt=1)
        run.stop()
        run.wait()
        assert run.nothing_left()


def test_a_killed_zygote_is_replaced_when_it_is_needed(tmp_path: Path) -> None:
    with Run(tmp_path, args=ON) as run:
        run.start()
        pids = run.pids()
        run.wait_log("rank 1", rank=1)
        endpoint = run.dir.read_endpoint("zygote")
        assert endpoint is not None
        os.kill(endpoint.pid, signal.SIGKILL)
        run.wait_event("zygote_ready", 2)
        assert all(exists(pid) for pid in pids.values())
        os.kill(pids[1], signal.SIGKILL)
        assert run.wait_event("member_exited").data["rank"] == 1
        run.pids(attempt=1)
        run.let_end()
        assert run.wait() == 0 and run.nothing_left()


def stop_zygote(run: Run) -> int:
    """Stop the zygote of a run with SIGSTOP. Returns its process id."""
    endpoint = run.dir.read_endpoint("zygote")
    assert endpoint is not None
    os.kill(endpoint.pid, signal.SIGSTOP)
    return endpoint.pid


@pytest.mark.more
def test_a_stopped_zygote_is_replaced_when_it_does_not_answer(tmp_path: Path) -> None:
    with Run(tmp_path, args=ON) as run:
        run.start()
        pids = run.pids()
        run.wait_log("rank 1", rank=1)
        zygote = stop_zygote(run)
        os.kill(pids[1], signal.SIGKILL)
        assert run.wait_event("zygote_silent").data["asked"] == [5, 6, 7, 8]
        run.wait_event("zygote_ready", 2)
        assert not exists(zygote)
        run.let_end()
        assert run.wait() == 0
        assert [e.data["member_id"] for e in run.events("member_started")] == [1, 2, 3, 4, 9, 10, 11, 12]
        assert run.log(1, attempt=2).endswith("done\n") and run.nothing_left()


def test_a_stopped_zygote_does_not_hold_up_the_end(tmp_path: Path) -> None:
    with Run(tmp_path, args=ON) as run:
        run.start()
        pids = run.pids()
        run.wait_log("rank 1", rank=1)
        stop_zygote(run)
        os.kill(pids[1], signal.SIGKILL)
        run.wait_event("generation_started", 2)
        run.stop()
        assert run.wait() == 130 and run.nothing_left()


FREEZES_AFTER_FORK = """
import os, signal, sys
from pathlib import Path
zygote = sys.modules["__main__"].Zygote
become, tell = zygote._become_child, zygote._tell
mark = Path(os.environ["HOLDFAST_RUN_DIR"], "ghost")
def become_and_stop(self):
    become(self)
    mark.write_text(str(os.getpid()))
    os.kill(os.getpid(), signal.SIGSTOP)
def stop_and_tell(self, message):
    if type(message).__name__ == "Spawned":
        os.kill(os.getpid(), signal.SIGSTOP)
    tell(self, message)
if not mark.exists():
    zygote._become_child, zygote._tell = become_and_stop, stop_and_tell
"""
"""A module for zygotes to preload: the first one and its child stop after the fork, before they say a word."""


def test_a_worker_whose_zygote_died_before_it_said_so_is_not_a_second_one(tmp_path: Path) -> None:
    with Run(tmp_path, args=ON, nproc=1, preload=("freeze",)) as run:
        (tmp_path / "stub" / "freeze.py").write_text(FREEZES_AFTER_FORK)
        run.start()
        mark = run.dir.path / "ghost"
        ghost = int(until("the fork", lambda: mark.exists() and mark.read_text()))
        endpoint = run.dir.read_endpoint("zygote")
        assert endpoint is not None
        os.kill(endpoint.pid, signal.SIGKILL)
        run.wait_event("member_started")
        os.kill(ghost, signal.SIGCONT)
        assert run.wait_event("ghost_killed").data == {"member": 1, "pid": ghost}
        run.let_end()
        assert run.wait() == 0
        assert [e.data["member_id"] for e in run.events("member_started")] == [2] and run.nothing_left()


LAUNCHER = """
import sys, time
from pathlib import Path
from holdfast.runtime.node.agent_client import start_agent
start_agent(Path(sys.argv[1]))
time.sleep(600)
"""


def test_a_dead_launcher_ends_the_run(tmp_path: Path) -> None:
    with Run(tmp_path, args=ON, grace_s=1.0) as run:
        with subprocess.Popen([sys.executable, "-c", LAUNCHER, str(run.dir.path)]) as launcher:
            run.pids()
            run.wait_log("rank 0")
            launcher.kill()
        run.wait_event("agent_ended")
        until("nothing left", run.nothing_left)


def test_leftovers_of_a_dead_worker_die_with_it(tmp_path: Path) -> None:
    script = "import subprocess\nchild = subprocess.Popen(['sleep', '600'])\nprint('child', child.pid, flush=True)\n"
    with Run(tmp_path, script + LOOP, args=ON, nproc=1) as run:
        run.start()
        pids = run.pids()
        run.wait_log("rank 0")
        child = int(run.log(0).split()[1])
        os.kill(pids[0], signal.SIGKILL)
        until("the child is gone", lambda: not exists(child))
        run.stop()
        assert run.wait() == 130 and run.nothing_left()


def test_a_process_that_left_the_group_is_swept_at_the_end(tmp_path: Path) -> None:
    script = "import subprocess\nsubprocess.Popen(['sleep', '600'], start_new_session=True)\nprint('ok')\n"
    with Run(tmp_path, script, nproc=1, zygote=False) as run:
        run.start()
        assert run.wait() == 0
        assert len(run.events("leftovers_killed")) == 1 and run.nothing_left()
