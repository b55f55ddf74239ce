"""A job with an announced section before every fourth step. A rank is killed in one, and later another rank hangs."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

import holdfast
from tests.session.once import first

DIE_STEP, HANG_STEP, STEPS = 4, 14, 18


def spin() -> None:
    """Hang."""
    while True:
        pass


def main(place: Path) -> None:
    """Train."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with holdfast.session(model=model, optimizer=optimizer, seed=3) as s:
        for step in s.steps(until=STEPS):
            if step.number % DIE_STEP == 0 and not step.again:
                with s.section("eval"):
                    if step.number == DIE_STEP and rank == 1 and first(place / "died"):
                        os.kill(os.getpid(), signal.SIGKILL)
                    dist.all_reduce(torch.ones(1))
                    time.sleep(2.0 if step.number == 2 * DIE_STEP else 0.0)
                print(f"evaluated before step {step.number}", flush=True)
            with step:
                model(torch.randn(4, 8)).sum().backward()
                if step.number == HANG_STEP and rank == 2 and first(place / "hung"):
                    spin()
                optimizer.step()
                optimizer.zero_grad()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
