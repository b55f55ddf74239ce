"""Rank 0 alone has an average of the weights. Rank 1 is lost, and then rank 0. See ``test_memory_tier.py``."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, TensorDataset

import holdfast
from holdfast.session.checkpoints import memory_tier
from tests.session.once import first

KILLED_AT = {3: 1, 6: 0}


def main() -> None:
    """Train, and print the average."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    raw = nn.Linear(4, 2)
    average = AveragedModel(raw)
    model = DistributedDataParallel(raw)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(TensorDataset(torch.randn(40, 4)), batch_size=4)
    state = {"average": average} if rank == 0 else {}
    with holdfast.session(model=model, optimizer=optimizer, state=state) as s:
        for step in s.steps(loader, epochs=1):
            with step as (x,):
                model(x).square().sum().backward()
                # The backward pass shows that the other rank is in its block: only there it can go back in place.
                if KILLED_AT.get(step.number) == rank and first(Path(f"killed-{rank}")):
                    os.kill(os.getpid(), signal.SIGKILL)
                optimizer.step()
                optimizer.zero_grad()
                if rank == 0:
                    average.update_parameters(raw)
    if rank == 0:
        print(f"ends at {s.step}: {average.n_averaged} steps averaged", flush=True)


if __name__ == "__main__":
    vars(memory_tier)["SHARE"] = (
        1e-9  # copies are so dear that only those at a start and after a recovery are made
    )
    main()
