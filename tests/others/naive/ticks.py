"""The script ``ticks`` with its counter left in variables, which a replacement begins again."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import holdfast
from tests.others.beat import beat, end, long

EPOCHS = long(3)
TICK = 3
dist.init_process_group("gloo")
torch.manual_seed(7)
inputs = torch.randn(40, 6, generator=torch.Generator().manual_seed(1))
data = TensorDataset(inputs, inputs.sum(1, keepdim=True))
sampler = DistributedSampler(data)  # type: ignore[var-annotated]
loader = DataLoader(data, batch_size=4, sampler=sampler)
raw = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 1))
model = DistributedDataParallel(raw)
optimizer = torch.optim.SGD(raw.parameters(), lr=0.05, momentum=0.9)
criterion = nn.MSELoss()
tick, tick_start = 0, 0


def mean_of(value: torch.Tensor) -> float:
    """Return the sum of ``value`` over all ranks."""
    total = value.detach().double()
    dist.all_reduce(total)
    return float(total)


with holdfast.session(model=model, optimizer=optimizer, checkpoint="ckpt") as s:
    for step in s.steps(loader, epochs=EPOCHS):
        with step as (x, y):
            beat(step.number)
            optimizer.zero_grad()
            loss = criterion(model(x), y)
            loss.backward()
            optimizer.step()
        if not step.committed:
            continue
        number = step.number + 1
        if tick > 0 and number < tick_start + TICK:
            continue
        mean = mean_of(loss)
        tick += 1
        tick_start = number

end(raw, tick=tick)
dist.destroy_process_group()
