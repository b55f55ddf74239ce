"""Rank 0 evaluates after each epoch and sends the result to all ranks as an object, which stop early by it (YOLO)."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from tests.others.beat import beat, beat_inside, end, long

EPOCHS = long(4)
PATIENCE = 2
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(7)
inputs = torch.randn(40, 6, generator=torch.Generator().manual_seed(1))
data = TensorDataset(inputs, inputs.sum(1, keepdim=True))
sampler = DistributedSampler(data)  # type: ignore[var-annotated]
loader = DataLoader(data, batch_size=4, sampler=sampler)
raw = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 1))
model = DistributedDataParallel(raw)
optimizer = torch.optim.SGD(raw.parameters(), lr=0.05, momentum=0.9)
criterion = nn.MSELoss()
best = {"fitness": -1e9, "epoch": 0}

for epoch in range(EPOCHS):
    sampler.set_epoch(epoch)
    for i, (x, y) in enumerate(loader):
        beat(epoch * len(loader) + i)
        optimizer.zero_grad()
        criterion(model(x), y).backward()
        optimizer.step()
    told: list[float | None] = [None]
    if rank == 0:
        with torch.no_grad():
            told = [-criterion(raw(inputs), data.tensors[1]).item()]
    dist.broadcast_object_list(told, 0)
    fitness = told[0]
    assert fitness is not None
    if fitness > best["fitness"]:
        best["fitness"], best["epoch"] = fitness, epoch
    beat_inside(epoch)
    if epoch - best["epoch"] >= PATIENCE:
        break

end(raw, **best)
dist.destroy_process_group()
