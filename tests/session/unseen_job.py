"""A job in which a rank kills the agent and stops a few steps after the start, so no agent has seen a step of it."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist

import holdfast
from holdfast.runtime.node.rundir import RunDir

STOP_STEP, STEPS = 6, 12


def main(place: Path) -> None:
    """Train."""
    marker = place / "stopped"
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with holdfast.session(model=model, optimizer=optimizer, seed=3) as s:
        for step in s.steps(until=STEPS):
            if step.number == STOP_STEP and dist.get_rank() == 1 and not marker.exists():
                marker.write_text("")
                agent = RunDir(Path(os.environ["HOLDFAST_RUN_DIR"])).read_endpoint("agent")
                assert agent is not None
                os.kill(agent.pid, signal.SIGKILL)
                os.kill(os.getpid(), signal.SIGSTOP)
            with step:
                model(torch.randn(4, 8)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
