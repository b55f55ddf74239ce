"""A model that is not wrapped for data parallelism, on two ranks with different data."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import holdfast


def main() -> None:
    """Train without gradient exchange."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    net = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    data = TensorDataset(torch.randn(32, 4, generator=torch.Generator().manual_seed(1)))
    loader = DataLoader(data, 4, sampler=DistributedSampler(data))
    with holdfast.session(model=net, optimizer=optimizer) as s:
        for step in s.steps(loader, until=20):
            with step as (x,):
                net(x).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
