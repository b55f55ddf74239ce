"""Rank 1 of two is replaced. The only other rank is killed while the newcomer rehearses. See ``test_givers.py``."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import holdfast
from tests.session.once import first

STEPS = 12
KILLED_AT = 5
VICTIM = Path("victim")


def main() -> None:
    """Train."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with holdfast.session(model=model, optimizer=optimizer, memory=0) as s:
        for step in s.steps(until=STEPS):
            with step:
                if step.number == KILLED_AT and rank == 0 and not VICTIM.exists():
                    VICTIM.write_text(str(os.getpid()))
                if step.number == KILLED_AT and rank == 1 and first(Path("killed")):
                    while not VICTIM.exists():
                        time.sleep(0.01)
                    os.kill(os.getpid(), signal.SIGKILL)
                if step.number == KILLED_AT and rank == 1 and first(Path("rehearsed")):
                    os.kill(int(VICTIM.read_text()), signal.SIGKILL)
                    while (
                        not s._rank.fenced
                    ):  # a rehearsal may take minutes: this one is running when the fault is answered
                        time.sleep(0.01)
                model(torch.full((2, 4), 0.1 * step.number + rank)).square().sum().backward()
                optimizer.step()
                optimizer.zero_grad()
    print(f"ends at {s.step}: {[p.tolist() for p in model.parameters()]}", flush=True)


if __name__ == "__main__":
    main()
