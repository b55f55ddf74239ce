"""A helper around the steps that ends the loop by a count of its turns (DINOv2's ``MetricLogger.log_every``)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import holdfast
from tests.others.beat import beat, end, long

STEPS = long(9)
dist.init_process_group("gloo")
torch.manual_seed(7)
inputs = torch.randn(80, 6, generator=torch.Generator().manual_seed(1))
data = TensorDataset(inputs, inputs.sum(1, keepdim=True))
loader = DataLoader(data, batch_size=4, sampler=DistributedSampler(data))
raw = nn.Linear(6, 1)
model = DistributedDataParallel(raw)
criterion = nn.MSELoss()
optimizer = torch.optim.SGD(raw.parameters(), lr=0.05)


def log_every(iterable: Iterator[Any], iterations: int, start: int) -> Iterator[Any]:
    """Yield the items, at most as many as there are iterations to do."""
    i = start
    for item in iterable:
        yield item
        i += 1
        if i >= iterations:
            break


with holdfast.session(model=model, optimizer=optimizer, checkpoint="ckpt") as s:
    for step in log_every(s.steps(loader, until=STEPS), STEPS, s.step):
        with step as (x, y):
            beat(step.number)
            optimizer.zero_grad()
            loss = criterion(model(x), y)
            loss.backward()
            optimizer.step()

end(raw)
dist.destroy_process_group()
