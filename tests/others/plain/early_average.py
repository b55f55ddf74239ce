"""An average is a copy of the weights from before DDP, when each rank still has those of another seed."""

from __future__ import annotations

import copy

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from tests.others.beat import beat, end, long

EPOCHS = long(3)
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(7 + rank)
inputs = torch.randn(40, 6, generator=torch.Generator().manual_seed(1))
data = TensorDataset(inputs, inputs.sum(1, keepdim=True))
sampler = DistributedSampler(data)  # type: ignore[var-annotated]
loader = DataLoader(data, batch_size=4, sampler=sampler)
raw = nn.Sequential(nn.Linear(6, 16), nn.LayerNorm(16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 1))
average = copy.deepcopy(raw).requires_grad_(False)
model = DistributedDataParallel(raw)
optimizer = torch.optim.SGD(raw.parameters(), lr=0.05, momentum=0.9)
criterion = nn.MSELoss()

number = 0
for epoch in range(EPOCHS):
    sampler.set_epoch(epoch)
    for x, y in loader:
        beat(number)
        optimizer.zero_grad()
        loss = criterion(model(x), y)
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            for kept, new in zip(average.parameters(), raw.parameters(), strict=True):
                kept.lerp_(new, 0.1)
        number += 1

end(raw, average)
dist.destroy_process_group()
