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
biases = {id(p) for p in model.parameters() if p.ndim < 2}
weights = [p for p in model.parameters() if id(p) not in biases]
optimizer = ZeroRedundancyOptimizer(weights, torch.optim.AdamW, lr=1e-2, weight_decay=0.1)
optimizer.add_param_group({"params": [p for p in model.parameters() if id(p) in biases], "weight_decay": 0.0})


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
