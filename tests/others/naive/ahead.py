"""Batches drawn before the block of a step, only ``if not step.again``: a replacement does not draw them."""

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

ITERATIONS = long(8)
dist.init_process_group("gloo")
torch.manual_seed(7)
inputs = torch.randn(40, 6, generator=torch.Generator().manual_seed(1))
data = TensorDataset(inputs, inputs.sum(1, keepdim=True))
loader = DataLoader(data, batch_size=4, sampler=DistributedSampler(data))
raw = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 1))
model = DistributedDataParallel(raw)
optimizer = torch.optim.SGD(raw.parameters(), lr=0.05, momentum=0.9)
criterion = nn.MSELoss()


def cycle() -> Iterator[Any]:
    """Yield the batches of all epochs."""
    while True:
        yield from loader


batches_of_all = cycle()
with holdfast.session(model=model, optimizer=optimizer, checkpoint="ckpt") as s:
    for step in s.steps(until=ITERATIONS):
        if not step.again:
            batches = [next(batches_of_all) for _ in range(2)]
        with step:
            beat(step.number)
            optimizer.zero_grad()
            for x, y in batches:
                (criterion(model(x), y) / 2).backward()
            optimizer.step()
batches = []

end(raw)
dist.destroy_process_group()
