"""Each rank runs the branches of the model in another order; DDP sums the gradients in the order of rank 0."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

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

for step in range(MAX_ITERS):
    beat(step)
    x = data[(torch.arange(4) * ranks + rank + step) % len(data)]
    loss = model(x, rank)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if rank == 0:
        print(f"iter {step}: loss {loss.item():.4f}")

end(raw)
dist.destroy_process_group()
