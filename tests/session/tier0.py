"""A plain torchrun script without Holdfast. In its first life, rank 1 dies in the middle of the training.

With the argument ``raise`` it dies by an exception.
"""

from __future__ import annotations

import os
import signal
import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

STEPS, DEATH = 20, 8


def main() -> None:
    """Train, and print the end."""
    dist.init_process_group("gloo")
    rank, life = dist.get_rank(), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    model = DistributedDataParallel(torch.nn.Linear(64, 64))
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(STEPS):
        if (rank, step, life) == (1, DEATH, 0):
            if "raise" in sys.argv:
                raise ValueError("a bad sample")
            os.kill(os.getpid(), signal.SIGKILL)
        model(torch.randn(8, 64)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    print(f"rank {rank} done in life {life} on {dist.get_backend()}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
