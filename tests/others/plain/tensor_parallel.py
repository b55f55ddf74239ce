"""Tensor parallel without zero_grad(), as in PyTorch's example."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)

from tests.others.beat import beat, end, long

MAX_ITERS = long(4)
dist.init_process_group("gloo")
torch.manual_seed(0)
mesh = init_device_mesh("cpu", (2,))
raw = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
plan: dict[str, ParallelStyle] = {"0": ColwiseParallel(), "2": RowwiseParallel()}
model = parallelize_module(raw, mesh, plan)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
batches = torch.randn(MAX_ITERS, 4, 8)

for iteration in range(MAX_ITERS):
    beat(iteration)
    output = model(batches[iteration])
    output.sum().backward()
    optimizer.step()

end(raw)
dist.destroy_process_group()
