"""DDP over numbered samples. Every rank writes down the samples that counted. Any number of ranks, any batch size."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import holdfast

SAMPLES = 48


def main() -> None:
    """Train one epoch, or a part of it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--checkpoint", required=True)
    parser.add_argument("--batch", type=int, required=True)
    parser.add_argument("--until", type=int, default=1000)
    parser.add_argument("--fewer", type=int, default=-1, help="rank whose dataset lacks a sample")
    parser.add_argument("--shift", type=int, default=0, help="added to every sample")
    parser.add_argument("--seen", type=Path, required=True)
    arguments = parser.parse_args()
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    torch.manual_seed(1)
    net: Any = nn.Linear(1, 1)
    if world > 1:
        dist.init_process_group("gloo")
        net = DistributedDataParallel(net)
    data = TensorDataset(torch.arange(SAMPLES - int(rank == arguments.fewer)) + arguments.shift)
    sampler: DistributedSampler[Any] = DistributedSampler(data, world, rank, seed=3)
    loader = DataLoader(data, arguments.batch, sampler=sampler)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    with holdfast.session(model=net, optimizer=optimizer, checkpoint=arguments.checkpoint) as s:
        for step in s.steps(loader, until=arguments.until, epochs=1):
            with step as (numbers,):
                net(numbers.float().unsqueeze(1)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            if step.committed:
                with arguments.seen.open("a") as file:
                    file.write("".join(f"{int(number)}\n" for number in numbers))
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
