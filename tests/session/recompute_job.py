"""DDP with a device that computes wrong numbers: ``python recompute_job.py WAY EVERY``.

WAY is ``calm``; ``always``: from step 4 on, rank 1 flips a bit in each matrix product, until its process ends;
``once``: in one product, in a run for the check; ``ranked``: the block depends on the rank.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import xxhash
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import holdfast

STEPS = 9
WRONG_FROM = 4


class Device:
    """A simulated device that flips bits in the output of a linear layer."""

    def __init__(self, way: str, rank: int) -> None:
        self._way = way if rank == 1 and not Path("replaced").exists() else "calm"
        self.step = -1

    def __call__(self, module: nn.Module, given: Any, out: torch.Tensor) -> torch.Tensor | None:
        if self._way == "calm" or self.step < WRONG_FROM:
            return None
        if self._way == "once":
            self._way = "calm"
        Path("replaced").touch()
        bits = torch.zeros_like(out, dtype=torch.int32)
        bits[0, 0] = 1 << 20
        flipped: torch.Tensor = (out.detach().view(torch.int32) ^ bits).view(torch.float32)
        return out + (flipped - out.detach())


def main(way: str, every: int) -> None:
    """Train."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 1))
    device = Device(way, rank)
    net[0].register_forward_hook(device)
    model = DistributedDataParallel(net)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    data = TensorDataset(torch.randn(60, 6, generator=torch.Generator().manual_seed(1)))
    sampler: DistributedSampler[Any] = DistributedSampler(data)
    loader = DataLoader(data, 4, sampler=sampler)
    with holdfast.session(model=model, optimizer=optimizer, checkpoint="ckpt", verify_ranks=every) as s:
        for step in s.steps(loader, until=STEPS):
            device.step = step.number
            with step as (x,):
                scale = rank + 1 if way == "ranked" else 1
                (model(x) * scale - x.sum(1, keepdim=True)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
    total = xxhash.xxh3_128()
    for tensor in net.state_dict().values():
        total.update(tensor.numpy().tobytes())
    Path(f"ended-{rank}").write_text(total.hexdigest())
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
