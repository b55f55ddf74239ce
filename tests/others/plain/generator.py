"""Batches come from a generator."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tests.others.beat import beat, end, long

EPOCHS = long(3)
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(7)


def batches() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield the batches of one epoch of this rank."""
    draw = torch.Generator().manual_seed(1 + rank)
    for _ in range(5):
        x = torch.randn(4, 6, generator=draw)
        yield x, x.sum(1, keepdim=True)


raw = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 1))
model = DistributedDataParallel(raw)
optimizer = torch.optim.SGD(raw.parameters(), lr=0.05, momentum=0.9)
criterion = nn.MSELoss()

number = 0
for _ in range(EPOCHS):
    for x, y in batches():
        beat(number)
        optimizer.zero_grad()
        loss = criterion(model(x), y)
        loss.backward()
        optimizer.step()
        number += 1

end(raw)
dist.destroy_process_group()
