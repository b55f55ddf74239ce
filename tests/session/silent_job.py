"""A job in which one rank dies while another one computes in C with the interpreter's lock, so it cannot answer."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

import holdfast
from tests.session.once import first

DIE_STEP, STEPS = 6, 10


def stuck() -> None:
    """Match an expression that takes for ever. The process holds the interpreter's lock during the match."""
    re.match("(a+)+$", "a" * 64 + "b")


def main(place: Path) -> None:
    """Train."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with holdfast.session(model=model, optimizer=optimizer, seed=3) as s:
        for step in s.steps(until=STEPS):
            with step:
                if step.number == DIE_STEP and rank == 0 and first(place / "stuck"):
                    stuck()
                if step.number == DIE_STEP and rank == 1 and first(place / "died"):
                    while not (place / "stuck").exists():
                        time.sleep(0.01)
                    time.sleep(0.2)
                    os.kill(os.getpid(), signal.SIGKILL)
                model(torch.randn(4, 8)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
