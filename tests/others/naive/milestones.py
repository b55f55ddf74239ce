"""A weight in the loss that the loop sets before the block of every third step: other steps take it over."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import holdfast
from tests.others.beat import beat, end, long

EPOCHS = long(2)
dist.init_process_group("gloo")
torch.manual_seed(7)
inputs = torch.randn(40, 6, generator=torch.Generator().manual_seed(1))
data = TensorDataset(inputs, inputs.sum(1, keepdim=True))
loader = DataLoader(data, batch_size=4, sampler=DistributedSampler(data))
raw = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 1))
model = DistributedDataParallel(raw)
optimizer = torch.optim.SGD(raw.parameters(), lr=0.05, momentum=0.9)
criterion = nn.MSELoss()
weight = 1.0

with holdfast.session(model=model, optimizer=optimizer, checkpoint="ckpt") as s:
    for step in s.steps(loader, epochs=EPOCHS):
        if step.number and step.number % 3 == 0:
            weight = 1 / (1 + step.number)
        with step as (x, y):
            beat(step.number)
            optimizer.zero_grad()
            loss = criterion(model(x), y) + weight * raw(x).abs().mean()
            loss.backward()
            optimizer.step()

end(raw)
dist.destroy_process_group()
