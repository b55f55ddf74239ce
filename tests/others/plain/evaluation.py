"""An evaluation every few steps, with a sum over ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from tests.others.beat import beat, end, long

EPOCHS = long(3)
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(7)
inputs = torch.randn(40, 6, generator=torch.Generator().manual_seed(1))
data = TensorDataset(inputs, inputs.sum(1, keepdim=True))
sampler = DistributedSampler(data)  # type: ignore[var-annotated]
loader = DataLoader(data, batch_size=4, sampler=sampler)
raw = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 1))
model = DistributedDataParallel(raw)
optimizer = torch.optim.SGD(raw.parameters(), lr=0.05, momentum=0.9)
criterion = nn.MSELoss()
scores: list[float] = []


def evaluate() -> float:
    """Return the mean loss of all ranks, each on its own data."""
    model.eval()
    with torch.no_grad():
        x = torch.randn(8, 6, generator=torch.Generator().manual_seed(100 + rank))
        total = criterion(raw(x), x.sum(1, keepdim=True))
        dist.all_reduce(total)
    model.train()  # type: ignore[no-untyped-call]
    return float(total)


number = 0
for epoch in range(EPOCHS):
    sampler.set_epoch(epoch)
    for x, y in loader:
        if number % 4 == 0:
            scores.append(evaluate())
        beat(number)
        optimizer.zero_grad()
        loss = criterion(model(x), y)
        loss.backward()
        optimizer.step()
        number += 1

end(raw, scores=scores)
dist.destroy_process_group()
