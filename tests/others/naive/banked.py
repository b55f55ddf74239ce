"""A bank of means of earlier outputs that is in no session, and is too large or too deep to be read at each update."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import holdfast
from tests.others.beat import beat, end, long

EPOCHS = long(3)
PLACE = os.environ["PLACE"]
KINDS = 4

dist.init_process_group("gloo")
torch.manual_seed(7)
inputs = torch.randn(40, 6, generator=torch.Generator().manual_seed(1))
data = TensorDataset(inputs, inputs.sum(1, keepdim=True))
sampler = DistributedSampler(data)  # type: ignore[var-annotated]
loader = DataLoader(data, batch_size=4, sampler=sampler)
raw = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 1))
model = DistributedDataParallel(raw)
optimizer = torch.optim.SGD(raw.parameters(), lr=0.002, momentum=0.9)
criterion = nn.MSELoss()
banks: dict[str, Any] = {
    "list": [torch.zeros(1) for _ in range(KINDS)],
    "arrays": [np.array(0.0) for _ in range(KINDS)],
    "large": torch.zeros(300_000),
}
bank = banks[PLACE]

with holdfast.session(model=model, optimizer=optimizer, checkpoint="ckpt") as s:
    for step in s.steps(loader, epochs=EPOCHS):
        kind = step.number % KINDS
        with step as (x, y):
            beat(step.number)
            optimizer.zero_grad()
            output = model(x)
            (criterion(output, y) + (output.mean() - float(bank[kind])).square()).backward()
            optimizer.step()
        if step.committed:
            bank[kind] = 0.9 * bank[kind] + 0.1 * output.mean().item()

end(raw)
dist.destroy_process_group()
