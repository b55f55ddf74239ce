"""A training whose blocks begin communication for the next block.

Usage: ``prefetch_job.py KIND [VERIFY_BLOCK]``, where KIND is ``receive`` or ``sum``. Rank 1 is killed once, in step
``DEATH`` before it communicates.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import holdfast

STEPS = 6
DEATH = 3
SIZE = 4


class Ahead:
    """Data that is received one block before it is used."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.data = torch.zeros(SIZE)
        self.work: dist.Work | None = None

    def begin(self, number: int) -> None:
        """Begin to receive, or to sum, the data of step ``number``."""
        self.data = torch.full((SIZE,), float(number))
        self.work = (
            dist.irecv(self.data, 1) if self.kind == "receive" else dist.all_reduce(self.data, async_op=True)
        )

    def take(self, number: int) -> torch.Tensor:
        """Wait for the data of step ``number``."""
        if self.work is None:
            self.begin(number)
        assert self.work is not None
        self.work.wait()
        return self.data.clone()


def main(kind: str, verify_block: int) -> None:
    """Train."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(SIZE, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    marker, ahead = Path("died"), Ahead(kind)
    with holdfast.session(
        model=model, optimizer=optimizer, checkpoint="ckpt", memory=0, verify_block=verify_block
    ) as s:
        for step in s.steps(range(STEPS)):
            with step:
                number = step.number
                if rank == 1 and number == DEATH and not marker.exists():
                    marker.touch()
                    os.kill(os.getpid(), signal.SIGKILL)
                if kind == "receive" and rank == 1:
                    dist.isend(torch.full((SIZE,), float(100 * number)), 0)
                    data = torch.ones(SIZE)
                else:
                    data = ahead.take(number)
                optimizer.zero_grad()
                model(data).sum().backward()
                if rank == 0 or kind == "sum":
                    ahead.begin(number + 1)
                optimizer.step()


if __name__ == "__main__":
    main(sys.argv[1], int([*sys.argv, "2000"][2]))
