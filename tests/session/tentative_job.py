"""Rank 0 dies in a step with two updates, while rank 1 is between its sum of gradients and its first update.

The block of rank 1 still runs when it gives its state to the replacement. See ``test_givers.py``.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import holdfast
from tests.session.once import first

STEPS, KILLED_AT = 8, 4


def main() -> None:
    """Train."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with holdfast.session(model=model, optimizer=optimizer) as s:
        for step in s.steps(until=STEPS):
            with step:
                for part in range(2):
                    optimizer.zero_grad()
                    (model(torch.full((2, 4), 0.1 * step.number + rank)).square().sum() + part).backward()
                    for parameter in model.parameters():
                        dist.all_reduce(parameter.grad)
                    here = step.number == KILLED_AT and part == 0
                    if here and rank == 0 and first(Path("killed")):
                        time.sleep(0.1)  # the sum of rank 1 ends
                        os.kill(os.getpid(), signal.SIGKILL)
                    if here and rank == 1 and first(Path("waited")):
                        while not s._rank.fenced:
                            time.sleep(0.01)
                        time.sleep(0.2)  # the order to give the state is being carried out
                    with step.update(f"part {part}"):
                        optimizer.step()
                    if here and rank == 1 and first(Path("updated")):
                        time.sleep(3)  # the replacement reads the state
    print(f"ends at {s.step}: {[p.tolist() for p in model.parameters()]}", flush=True)


if __name__ == "__main__":
    main()
