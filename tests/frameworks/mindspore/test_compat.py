"""MindSpore's own TrainFaultTolerance and msrun's agent hook, unchanged, with Holdfast's mindio_ttp and taskd."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast import event_log
from holdfast.runtime.node.spawn import free_port
from tests.frameworks.launched import until
from tests.frameworks.started import BIN, BOUND_S, sweep

WORLD = 4
JOB = Path(__file__).parent / "ttp_job.py"
pytestmark = [pytest.mark.timeout(3 * BOUND_S), pytest.mark.usefixtures("drop_in")]


def msrun(folder: Path, flags: str, *options: str, die: str = "") -> str:
    """Run the job to its end, and check that no process of it is left. Return the output of msrun."""
    folder.mkdir(exist_ok=True)
    env = {**os.environ, "PATH": f"{BIN}:{os.environ['PATH']}", "JOB_FOLDER": str(folder), "MS_ENABLE_TFT": flags,
           "MINDIO_FOR_MINDSPORE": "1", "JOB_PORT": str(free_port()), **({"JOB_DIE": die} if die else {})}  # fmt: skip
    number = len(list(folder.glob("log-*")))
    out = folder / f"out-{number}"
    command = [
        str(BIN / "msrun"), f"--worker_num={WORLD}", f"--local_worker_num={WORLD}", f"--master_port={free_port()}",
        f"--log_dir={folder / f'log-{number}'}", "--cluster_time_out=120", *options, str(JOB),
    ]  # fmt: skip
    with open(out, "wb") as stream:
        process = subprocess.Popen(
            command, cwd=folder, env=env, stdout=stream, stderr=stream, start_new_session=True
        )
    try:
        process.wait(BOUND_S)
        until("the controller ends", lambda: any(e.kind == "gone" for e in log(folder)), BOUND_S)
    finally:
        sweep(folder)
    return out.read_text()


def log(folder: Path) -> list[event_log.Event]:
    """Return the log of the controllers."""
    path = folder / "ttp_controller.jsonl"
    return list(event_log.read(path).events) if path.exists() else []


def final(folder: Path) -> set[bytes]:
    """Return the final weights of all ranks."""
    files = list(folder.glob("final-*"))
    assert len(files) == WORLD
    return {path.read_bytes() for path in files}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> set[bytes]:
    folder = tmp_path_factory.mktemp("undisturbed")
    msrun(folder, "{TTP:1}", "--join=True")
    assert not [e for e in log(folder) if e.kind == "fault"]
    weights = final(folder)
    assert len(weights) == 1
    return weights


def test_rank_0_is_killed_and_a_good_rank_saves(tmp_path: Path, undisturbed: set[bytes]) -> None:
    msrun(tmp_path, "{TTP:1}", "--join=False", die="0@7")
    until("the controller ends", lambda: [e for e in log(tmp_path) if e.kind == "gone"], BOUND_S)
    saved = list(tmp_path.glob("ttp/ttp_*/*/*"))
    assert [str(path.relative_to(tmp_path)) for path in saved] == [
        "ttp/ttp_saved_checkpoints-step_7/rank_1/ttp_rank_1-1_7.ckpt"
    ]
    end = next(e for e in log(tmp_path) if e.kind == "end")
    assert end.data == {"step": 7, "saved": True, "why": ""}
    print(f"kill to published checkpoint: {end.t_wall - float((tmp_path / 'died').read_text()):.3f} s")
    msrun(tmp_path, "{TTP:1}", "--join=True")
    assert "resumes at 7" in next(tmp_path.glob("log-1/worker_0.log")).read_text()
    assert final(tmp_path) == undisturbed


def test_msrun_starts_all_workers_again(tmp_path: Path, undisturbed: set[bytes]) -> None:
    said = msrun(tmp_path, "{TTP:1,RSC:1}", "--join=True", die="2@7")
    assert re.search(r"holdfast: .*rank 2 \(status -?\d+\).* ended: all workers start again", said), said
    assert final(tmp_path) == undisturbed
    assert next(e.data["step"] for e in log(tmp_path) if e.kind == "end") == 7


def test_mindspores_own_graceful_exit_when_one_rank_is_asked(tmp_path: Path) -> None:
    env = {**os.environ, "PATH": f"{BIN}:{os.environ['PATH']}", "JOB_FOLDER": str(tmp_path)}
    env["MS_ENABLE_GRACEFUL_EXIT"] = "1"
    command = [
        str(BIN / "msrun"), "--worker_num=2", "--local_worker_num=2", f"--master_port={free_port()}", "--join=True",
        f"--log_dir={tmp_path / 'log'}", "--cluster_time_out=120", str(JOB.with_name("exit_job.py")),
    ]  # fmt: skip
    try:
        done = subprocess.run(
            command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=BOUND_S, check=False
        )
    finally:
        sweep(tmp_path)
    logs = [(tmp_path / "log" / f"worker_{rank}.log").read_text() for rank in (0, 1)]
    assert done.returncode == 0, logs[0][-2000:]
    assert all(
        "Graceful exit is triggered, stop training" in text and "left after step 4" in text for text in logs
    )
    for kind in ("ckpt", "mindir"):
        assert all((tmp_path / f"rank_{rank}" / f"Net_train.{kind}").stat().st_size > 0 for rank in (0, 1))


def test_flags_that_need_ascend_are_refused_by_name() -> None:
    env = {**os.environ, "MS_ENABLE_TFT": "{TTP:1,UCE:1}"}
    done = subprocess.run(
        [sys.executable, "-c", "import mindspore"], env=env, capture_output=True, text=True, timeout=120
    )
    assert done.returncode != 0 and "UCE:1: repair in place needs Ascend" in done.stderr
