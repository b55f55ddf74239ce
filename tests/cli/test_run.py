"""``holdfast run`` as a shell sees it: its outputs, its exit codes, and no remains after its end."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import time
from pathlib import Path

import pytest

from holdfast.cli.start.launcher import AGENT_STOPPED_S
from holdfast.exit_codes import Exit
from holdfast.runtime.node.rundir import RunDir
from tests.cli.command import HOLDFAST, Run, clean_environment, working_in
from tests.runtime.runs import without_torch
from tests.session.launch import end

pytestmark = pytest.mark.processes

BOUND_S = 60
SCRIPT = """\
import os, pathlib, sys, time
rank = os.environ["RANK"]
print("rank", rank, "says", sys.argv[1:], flush=True)
if "die" in sys.argv and rank == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    print("last words", flush=True)
    os.kill(os.getpid(), 9)
if "raise" in sys.argv:
    # The rank that fails first ends the run, so both ranks print before that.
    pathlib.Path(f"said-{rank}").touch()
    while not all(pathlib.Path(f"said-{n}").exists() for n in range(int(os.environ["WORLD_SIZE"]))):
        time.sleep(0.01)
    undefined_name
if "unknown" in sys.argv:
    print("usage: train.py [--lr LR]", file=sys.stderr)
    sys.exit(2)
if "modules" in sys.argv:
    print("wave was there:", "wave" in sys.modules, flush=True)
if "wait" in sys.argv:
    pathlib.Path(f"up-{rank}").touch()
    time.sleep(300)
"""


@pytest.fixture(autouse=True)
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Write a script that needs no torch, in an environment without torch."""
    for name, value in without_torch(tmp_path).items():
        monkeypatch.setenv(name, value)
    (tmp_path / "train.py").write_text(SCRIPT)


def start(root: Path, *args: str) -> subprocess.Popen[str]:
    """Start ``holdfast run`` in the background, and return when both workers run."""
    process = subprocess.Popen(
        [HOLDFAST, "run", "--nproc-per-node", "2", "--run-id", "mine", *args, "train.py", "wait"],
        cwd=root,
        env=clean_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + BOUND_S
    while not all((root / f"up-{rank}").exists() for rank in range(2)):
        assert process.poll() is None and time.monotonic() < deadline, process.communicate(timeout=5)
        time.sleep(0.05)
    return process


def test_lines_of_ranks_begin_as_the_template_says(holdfast: Run) -> None:
    """The command line overrides the variable of torchrun. An unknown word of the template stays as it is."""
    template = "${hostname}:${role_name}${local_rank}:${rank} $5 ${more}: "
    env = {"TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": "<${rank}> "}
    flags = ("--nproc-per-node", "2", "--tee", "3", "--role", "trainer")
    result = holdfast("run", *flags, "--log-line-prefix-template", template, "train.py", "die", env=env)
    assert result.returncode == 0, result.stderr
    host = socket.gethostname()
    starts = [f"{host}:trainer{rank}:{rank} $5 ${{more}}: " for rank in range(2)]
    lines = result.stdout.splitlines()
    assert f"{starts[0]}rank 0 says ['die']" in lines and f"{starts[1]}last words" in lines
    assert all(line.startswith(tuple(starts)) for line in lines)
    assert holdfast("run", "train.py", env=env).stdout == "<0> rank 0 says []\n"


def test_a_run_to_its_end(holdfast: Run, tmp_path: Path) -> None:
    env = {"PET_NPROC_PER_NODE": "2"}
    result = holdfast("run", "--standalone", "--run-id", "mine", "train.py", "--nnodes", "4", env=env)
    assert result.returncode == 0, result.stderr
    assert result.stdout == "rank 0 says ['--nnodes', '4']\n"
    assert "note: --standalone has no effect" in result.stderr
    first, *_, last = [line for line in result.stderr.splitlines() if "note:" not in line]
    assert re.fullmatch(r"holdfast: \d\d:\d\d:\d\d 2 workers; see: holdfast status mine", first), first
    assert re.match(r"holdfast: \d\d:\d\d:\d\d run mine: ", last), last
    assert "the job ran to its end" in last and str(tmp_path / "runs" / "mine" / "attempt-000") in last
    assert "rank 1 says" in holdfast("logs", "--rank", "1").stdout
    assert (tmp_path / "runs" / "mine").stat().st_mode & 0o777 == 0o700
    assert working_in(tmp_path) == {}


@pytest.mark.more
def test_a_host_that_stood_still_keeps_its_agent(tmp_path: Path) -> None:
    """After the host resumes, the launcher's clock shows a long stop of the agent.

    The launcher must look again first.
    """
    process = start(tmp_path)
    endpoint = RunDir(tmp_path / "runs" / "mine").read_endpoint("agent")
    assert endpoint is not None
    for pid in (process.pid, endpoint.pid):
        os.kill(pid, signal.SIGSTOP)
    time.sleep(AGENT_STOPPED_S + 0.5)
    os.kill(process.pid, signal.SIGCONT)
    time.sleep(0.5)
    os.kill(endpoint.pid, signal.SIGCONT)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=BOUND_S)
    assert "Ctrl-C" in said and "it is killed" not in said and "successor" not in said, said
    assert working_in(tmp_path) == {}


@pytest.mark.more
def test_a_stopped_agent_does_not_hold_up_an_exit(tmp_path: Path) -> None:
    """The launcher waits for the agent's answer, notices that the agent is stopped, and asks a successor."""
    process = start(tmp_path)
    endpoint = RunDir(tmp_path / "runs" / "mine").read_endpoint("agent")
    assert endpoint is not None
    os.kill(endpoint.pid, signal.SIGSTOP)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=1.5 * BOUND_S)
    assert process.returncode == Exit.UNSAVED and "it is killed" in said, said
    assert working_in(tmp_path) == {}


def test_a_run_without_its_directory_is_no_defect(tmp_path: Path) -> None:
    process = start(tmp_path)
    try:
        (tmp_path / "runs/mine").rename(tmp_path / "runs/gone")
        _, said = process.communicate(timeout=BOUND_S)
        assert process.returncode == Exit.BAD_INPUT, said
        assert f"error: {tmp_path / 'runs/mine'} was removed, or moved" in said and "  next: " in said
    finally:
        process.kill()
        process.wait()
        end(tmp_path)


def test_a_preloaded_module_is_there_before_the_script(holdfast: Run) -> None:
    assert "wave was there: False" in holdfast("run", "train.py", "modules").stdout
    assert "wave was there: True" in holdfast("run", "--preload", "wave", "train.py", "modules").stdout


def test_a_rank_that_dies_shows_its_last_lines(holdfast: Run, tmp_path: Path) -> None:
    result = holdfast("run", "--nproc-per-node", "2", "train.py", "die")
    assert result.returncode == 0, result.stderr
    assert "[rank 1] last words" in result.stdout
    assert "F001: rank 1" in result.stderr and "1 fault" in result.stderr
    assert (
        "F001: all workers were started again" in result.stderr and "training continues" not in result.stderr
    )
    assert working_in(tmp_path) == {}


def test_a_script_that_fails(holdfast: Run, tmp_path: Path) -> None:
    result = holdfast("run", "-t", "3", "--nproc-per-node", "2", "train.py", "raise")
    assert result.returncode == 1, result.stderr
    assert "NameError" in result.stdout and "[rank 0] rank 0 says" in result.stdout
    *_, error, after, log, report, then = result.stderr.splitlines()
    assert error.startswith("error: run ") and "NameError" in error and "(rank " in error
    assert after.startswith("  after: ") and after.endswith(" s")
    assert "NameError" in Path(report.removeprefix("  report: ")).read_text()
    assert Path(log.removeprefix("  log: ")).read_text().count("NameError") == 1
    assert then.startswith("  next: ") and "holdfast logs" in then
    assert working_in(tmp_path) == {}


def test_a_script_that_refuses_its_arguments_has_its_log_named(holdfast: Run) -> None:
    result = holdfast("run", "--nproc-per-node", "2", "train.py", "unknown")
    assert result.returncode == 1, result.stderr
    *_, then = result.stderr.splitlines()
    assert (
        "SystemExit: exit code 2" in result.stderr and "usage: train.py" in result.stdout + result.stderr
    ), result
    assert then.startswith("  next: read why the script ended itself before it trained: holdfast logs"), then


def test_ctrl_c_leaves_with_the_documented_code(tmp_path: Path) -> None:
    """The exit code is 76, because without a session there is nothing to save."""
    process = start(tmp_path)
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=BOUND_S)
    assert process.returncode == 76, error
    assert "Ctrl-C" in error and "no session was open" in error and error.count("  next: ") == 1
    assert "--grace-s" not in error
    assert '"agent_ended","data":{"code":76,"step":0}' in (tmp_path / "runs/mine/events.jsonl").read_text()
    assert working_in(tmp_path) == {}


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGUSR2])
def test_the_warning_of_a_scheduler_is_graceful(tmp_path: Path, number: signal.Signals) -> None:
    process = start(tmp_path)
    process.send_signal(number)
    _, error = process.communicate(timeout=BOUND_S)
    assert process.returncode == 76 and f"asked to exit ({number.name})" in error
    assert working_in(tmp_path) == {}


def test_exit_is_acknowledged(holdfast: Run, tmp_path: Path) -> None:
    process = start(tmp_path)
    answer = holdfast("exit", "mine", "--grace-s", "20")
    assert answer.returncode == 0 and "mine: " in answer.stdout, answer.stderr
    process.communicate(timeout=BOUND_S)
    assert process.returncode == 76
    over = holdfast("exit", "mine")
    assert over.returncode == 3 and "error: run mine is over" in over.stderr
    assert working_in(tmp_path) == {}


RAISES = """\
import os
from holdfast.core.protocol.status_page import Phase
from holdfast.runtime.worker.worker_client import WorkerClient
step = 4 + 5 * int(os.environ["TORCHELASTIC_RESTART_COUNT"])
WorkerClient.current().page.enter(Phase.FORWARD, step)
raise ValueError(f"bad sample {step % 3}")
"""


def test_an_exception_that_comes_again_and_again_is_told_with_its_steps(
    tmp_path: Path, holdfast: Run
) -> None:
    """The exception never comes twice at the same step, so the budget ends the run."""
    (tmp_path / "raises.py").write_text(RAISES)
    done = holdfast("run", "--run-id", "mine", "--max-restarts", "2", "raises.py")
    assert done.returncode == Exit.BUDGET, done.stderr
    again = "the same exception 3 times so far, at the steps 4, 9, 14"
    assert f"; rank 0: ValueError: bad sample 2: {again}\n" in done.stderr
    assert again in (tmp_path / "runs/mine/faults/F003.txt").read_text()
    assert "same exception" not in (tmp_path / "runs/mine/faults/F001.txt").read_text()
