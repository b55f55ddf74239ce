"""A learning rate that is halved where an evaluation is not better than the best one, which begins as None."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import holdfast
from tests.others.beat import beat, end


def evaluate() -> float:
    """Return the mean loss of other samples over all ranks."""
    with torch.no_grad():
        total = criterion(raw(others), others.sum(1, keepdim=True) + noise)
    dist.all_reduce(total)
    return float(total)


dist.init_process_group("gloo")
torch.manual_seed(7)
generator = torch.Generator().manual_seed(1)
inputs = torch.randn(24, 6, generator=generator)
others, noise = torch.randn(20, 6, generator=generator), torch.randn(20, 1, generator=generator)
data = TensorDataset(inputs, inputs.sum(1, keepdim=True) + torch.randn(24, 1, generator=generator))
loader = DataLoader(data, batch_size=4, sampler=DistributedSampler(data))
raw = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 1))
model = DistributedDataParallel(raw)
optimizer = torch.optim.Adam(raw.parameters(), lr=0.05)
criterion = nn.MSELoss()
best = None

with holdfast.session(model=model, optimizer=optimizer, checkpoint="ckpt") as s:
    for _epoch in s.epochs(8):
        for step in s.steps(loader):
            with step as (x, y):
                beat(step.number)
                optimizer.zero_grad()
                criterion(model(x), y).backward()
                optimizer.step()
        loss = evaluate()
        if best is None or loss < best:
            best = loss
        else:
            for group in optimizer.param_groups:
                group["lr"] = group["lr"] * 0.5

end(raw)
dist.destroy_process_group()
