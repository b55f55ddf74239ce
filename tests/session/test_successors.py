"""A worker dies together with agent and controller, which remember it. Living processes inform their successors."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from holdfast.drill.observer import ObservedRun
from holdfast.runtime.node.rundir import RunDir
from tests.runtime.runs import until
from tests.session.launch import start_job

pytestmark = [pytest.mark.torch, pytest.mark.processes]

BOUND_S = 120.0
RANKS = 3
STEPS = 60
SCRIPT = """\
import pathlib, time
import torch, torch.distributed as dist
import holdfast
dist.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 1))
optimizer = torch.optim.AdamW(model.parameters())
with holdfast.session(model=model, optimizer=optimizer, memory=0) as s:
    for step in s.steps(until=STEPS):
        with step:
            time.sleep(0.0 if pathlib.Path("struck").exists() else 0.2)
            model(torch.full((4, 8), 1.0 + step.number)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
end = torch.cat([value.detach().reshape(-1) for value in model.parameters()]).tolist()
pathlib.Path(f"end-{dist.get_rank()}").write_text(str(end))
"""


def kill(directory: RunDir, run: ObservedRun, daemons: tuple[str, ...]) -> None:
    """Kill the daemons and the worker at once."""
    pids = [*map(directory.serving, daemons), run.workers()[1].pid]
    assert all(pids)
    for pid in pids:
        os.kill(pid, signal.SIGKILL)


def freeze(directory: RunDir, run: ObservedRun, daemons: tuple[str, ...]) -> None:
    """Stop the agent when the next controller waits for it. That controller gets the workers from another agent."""
    controller, agent = map(directory.serving, daemons)
    os.kill(controller, signal.SIGKILL)
    until("the next one is started", lambda: directory.serving("controller") not in (0, controller))
    os.kill(agent, signal.SIGSTOP)
    os.kill(run.workers()[1].pid, signal.SIGKILL)


def check(place: Path) -> None:
    """Check that the worker was replaced and nothing else happened."""
    events = [json.loads(line) for line in (place / "runs/it/events.jsonl").read_text().splitlines()]
    assert {e["data"]["action"] for e in events if e["kind"] == "verdict"} == {"replace"}
    assert {e["data"]["steps_lost"] for e in events if e["kind"] == "restored"} == {0}


def train(
    where: Path, *daemons: str, strike: Callable[[RunDir, ObservedRun, tuple[str, ...]], None] = kill
) -> list[str]:
    """Train. In the middle, strike these daemons and the worker of rank 1. Return what each rank has at the end.

    The training is slow until then.
    """
    where.mkdir()
    (where / "train.py").write_text(SCRIPT.replace("STEPS", str(STEPS)))
    job = start_job(where, RANKS, subprocess.PIPE)
    try:
        if daemons:
            directory = RunDir(where / "runs/it")
            run = ObservedRun(directory.path)
            until("the training is under way", lambda: run.committed_step() >= 5)
            strike(directory, run, daemons)
        (where / "struck").touch()
        said, _ = job.communicate(timeout=BOUND_S)
    finally:
        job.kill()
        job.wait()
    assert job.returncode == 0, said
    return [path.read_text() for path in sorted(where.glob("end-*"))]


@pytest.mark.more
def test_what_a_dead_rank_held_is_known_to_its_peers(tmp_path: Path) -> None:
    calm = train(tmp_path / "calm")
    assert len(calm) == RANKS
    for daemons in (("agent", "controller"), ("agent",), ("controller",)):
        struck = tmp_path / "-".join(daemons)
        assert train(struck, *daemons) == calm
        check(struck)


@pytest.mark.more
def test_workers_that_a_new_controller_has_not_heard_are_waited_for(tmp_path: Path) -> None:
    train(tmp_path / "it", "controller", "agent", strike=freeze)
    check(tmp_path / "it")
