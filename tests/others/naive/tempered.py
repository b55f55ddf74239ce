"""A temperature, or a rate of a dropout, that falls with each step and is a plain attribute of a module under DDP."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import holdfast
from tests.others.beat import beat, end, long

EPOCHS = long(3)
PLACE = os.environ["PLACE"]


class Gated(nn.Module):
    """Two layers with gates between them, which a temperature makes sharper."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.drop, self.last = nn.Linear(6, 16), nn.Dropout(0.4), nn.Linear(16, 1)
        self.temperature = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return one number for each row of ``x``."""
        gates = torch.sigmoid(self.first(x) / self.temperature)
        result: torch.Tensor = self.last(self.drop(gates))
        return result


dist.init_process_group("gloo")
torch.manual_seed(7)
inputs = torch.randn(40, 6, generator=torch.Generator().manual_seed(1))
data = TensorDataset(inputs, inputs.sum(1, keepdim=True))
sampler = DistributedSampler(data)  # type: ignore[var-annotated]
loader = DataLoader(data, batch_size=4, sampler=sampler)
raw = Gated()
model = DistributedDataParallel(raw)
optimizer = torch.optim.SGD(raw.parameters(), lr=0.05, momentum=0.9)
criterion = nn.MSELoss()

with holdfast.session(model=model, optimizer=optimizer, checkpoint="ckpt") as s:
    for step in s.steps(loader, epochs=EPOCHS):
        with step as (x, y):
            beat(step.number)
            optimizer.zero_grad()
            criterion(model(x), y).backward()
            optimizer.step()
        if step.committed and PLACE == "temperature":
            raw.temperature *= 0.9
        if step.committed and PLACE == "dropout":
            raw.drop.p = raw.drop.p * 0.9

end(raw)
dist.destroy_process_group()
