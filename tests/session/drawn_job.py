"""A loader whose order depends on how often this process has iterated it: ``python drawn_job.py WHERE``.

Rank 1 is killed once in the second step of the second epoch, at WHERE: in the ``block``, after its ``update`` (in a job
that keeps a value of each rank), or ``behind`` (after) it. The new process begins to count at 0.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import holdfast

EPOCH_STEPS = 4


class Counting:
    """A sampler whose order depends on the number of its iteration."""

    def __init__(self, data: torch.Tensor) -> None:
        self._data = data
        self._turns = 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        order = torch.randperm(len(self._data), generator=torch.Generator().manual_seed(self._turns))
        self._turns += 1
        yield from torch.split(self._data[order], 2)


def main(where: str) -> None:
    """Train."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    data = torch.randn(2 * EPOCH_STEPS, 4, generator=torch.Generator().manual_seed(rank))

    def struck(step: int, here: str) -> None:
        if (rank, step, here) == (1, EPOCH_STEPS + 1, where) and not Path("struck").exists():
            Path("struck").touch()
            os.kill(os.getpid(), signal.SIGKILL)

    with holdfast.session(model=model, optimizer=optimizer, checkpoint="ckpt") as s:
        for step in s.steps(Counting(data), epochs=3):
            with step as x:
                if where == "update":
                    s.own = step.number
                model(x).square().mean().backward()
                struck(step.number, "block")
                optimizer.step()
                struck(step.number, "update")
                optimizer.zero_grad()
            if step.committed:
                struck(step.number, "behind")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
