"""Two ranks and their datasets: ``python unshared_job.py WAY``.

WAY is ``shared``: a sampler divides their dataset; ``alone``: there is no sampler; ``lengths``: there is no sampler,
and the dataset of rank 1 is longer; ``numbers``: the loop is over positions, and each rank cuts its part there.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import holdfast


def main(way: str) -> None:
    """Train."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(32 if way == "lengths" and dist.get_rank() == 1 else 24, 8))
    sampler: DistributedSampler[Any] | None = DistributedSampler(data) if way == "shared" else None
    loader = DataLoader(data, 4, sampler=sampler)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    parts = data.tensors[0].chunk(2)[dist.get_rank()]
    with holdfast.session(model=model, optimizer=optimizer) as s:
        for step in s.steps(range(0, 12, 4) if way == "numbers" else loader, until=3):
            with step as batch:
                x = parts[batch : batch + 4] if way == "numbers" else batch[0]
                model(x).square().sum().backward()
                optimizer.step()
                optimizer.zero_grad()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
