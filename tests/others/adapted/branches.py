"""Each rank runs the branches of the model in another order; DDP sums the gradients in the order of rank 0."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import holdfast
from tests.others.beat import beat, end, long

MAX_ITERS = long(12)


class Branches(nn.Module):
    """Four small networks with one input."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: torch.Tensor, first: int) -> torch.Tensor:
        """Return the sum of the squares of all branches, computed from branch ``first`` on."""
        total = torch.zeros(())
        for n in range(len(self.parts)):
            branch = (first + n) % len(self.parts)
            total = total + self.parts[branch](x).square().mean() * (branch + 1)
        return total


dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
torch.manual_seed(7)
raw = Branches()
model = DistributedDataParallel(raw, bucket_cap_mb=0.0004)
optimizer = torch.optim.SGD(raw.parameters(), lr=1e-2)
data = torch.randn(64, 8)

with holdfast.session(model=model, optimizer=optimizer, checkpoint="ckpt") as s:
    for step in s.steps(until=MAX_ITERS):
        with step:
            beat(step.number)
            x = data[(torch.arange(4) * ranks + rank + step.number) % len(data)]
            loss = model(x, rank)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        if step.committed and rank == 0:
            print(f"iter {step.number}: loss {loss.item():.4f}")

end(raw)
dist.destroy_process_group()
