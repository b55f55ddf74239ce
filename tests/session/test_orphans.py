"""Workers whose launcher and agent are both killed exit on their own, whatever they are doing."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest

from holdfast.drill.observer import ObservedRun
from holdfast.runtime.node.rundir import RunDir
from tests.runtime.runs import exists, until
from tests.session.launch import end, start_job

pytestmark = [pytest.mark.torch, pytest.mark.processes]

RANKS = 2
SCRIPT = """\
import pathlib, time
import torch, torch.distributed as dist
import holdfast
from holdfast.runtime.worker.worker_client import WorkerClient
ask = WorkerClient.kv
def noted(self, op, keys=(), **more):
    if op == "wait" and keys[0].startswith("holdfast/resume"):
        pathlib.Path("waits").touch()
    return ask(self, op, keys, **more)
WorkerClient.kv = noted
dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 1))
optimizer = torch.optim.AdamW(model.parameters())
while dist.get_rank() == 0:
    time.sleep(0.1)
with holdfast.session(model=model, optimizer=optimizer) as s:
    pass
"""


def test_a_rank_that_waits_for_another_one_s_session_leaves(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    launcher = start_job(tmp_path, RANKS, subprocess.DEVNULL)
    try:
        until("rank 1 waits for rank 0", (tmp_path / "waits").exists)
        directory = RunDir(tmp_path / "runs/it")
        workers = [worker.pid for worker in ObservedRun(directory.path).workers().values()]
        assert len(workers) == RANKS
        lost = (launcher.pid, directory.serving("agent"))
        for number in (
            signal.SIGSTOP,
            signal.SIGKILL,
        ):  # an agent that sees the death of its launcher ends the ranks
            for pid in lost:
                os.kill(pid, number)
        until("both have left", lambda: not any(map(exists, workers)))
    finally:
        launcher.kill()
        launcher.wait()
        end(tmp_path)
    said = [log.read_text() for log in sorted(directory.path.glob("attempt-*/rank-*.log"))]
    assert all("launcher and agent " in text for text in said) and len(said) == RANKS, said
