"""torch's ZeroRedundancyOptimizer: each rank updates some of the parameters, then sends them to the others."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer

from tests.others.beat import beat, end, long

MAX_ITERS = long(12)
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(1337)
model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)))
optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-2)


def get_batch() -> tuple[torch.Tensor, torch.Tensor]:
    """Return samples that differ between ranks."""
    generator = torch.Generator().manual_seed(int(torch.randint(1 << 30, ())) + rank)
    x = torch.randn(6, 8, generator=generator)
    return x, x[:, :4].sin()


for iteration in range(MAX_ITERS):
    beat(iteration)
    x, y = get_batch()
    loss = (model(x) - y).square().mean()
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    optimizer.step()
    if rank == 0:
        print(f"iter {iteration}: loss {loss.item():.4f}")

end(model)
dist.destroy_process_group()
