"""A torchrun script without a session. In its first life, rank 1 calls another collective than the others do."""

from __future__ import annotations

import os
import time

import torch
import torch.distributed as dist

STEPS, WRONG = 60, 50


def main() -> None:
    """Run the collectives, with one hang."""
    dist.init_process_group("gloo")
    rank, life = dist.get_rank(), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    for step in range(STEPS):
        time.sleep(0.06)
        if (step, life) == (WRONG, 0):
            if rank == 1:
                dist.all_reduce(torch.ones(4096))
            else:
                dist.broadcast(torch.ones(4096), 1)
        dist.all_reduce(torch.ones(64))
    print(f"rank {rank} done in life {life}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
