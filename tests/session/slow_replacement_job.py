"""Copies on two ranks, and a replacement whose start takes longer than any grace period.

Rank 1 kills itself in the block of step ``STRUCK_AT``, with SIGKILL. Its replacement sleeps before its session opens.
The files ``struck`` and ``replacing`` in the working directory report both.
"""

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

STRUCK_AT, START_S = 4, 600.0
STRUCK, REPLACING = Path("struck"), Path("replacing")


def main() -> None:
    """Train until the run is asked to exit."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    if rank == 1 and STRUCK.exists():
        REPLACING.touch()
        time.sleep(START_S)
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with holdfast.session(model=model, optimizer=optimizer, checkpoint="ckpts") as s:
        for step in s.steps(until=10_000):
            with step:
                if (rank, step.number) == (1, STRUCK_AT) and not STRUCK.exists():
                    STRUCK.touch()
                    os.kill(os.getpid(), signal.SIGKILL)
                model(torch.ones(2, 4)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()


if __name__ == "__main__":
    main()
