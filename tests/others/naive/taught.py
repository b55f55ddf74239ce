"""A student learns from a copy of itself that the script makes at one step. PLACE: where it makes the copy."""

from __future__ import annotations

import copy
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import holdfast
from tests.others.beat import beat, end, long

EPOCHS, BEGIN = long(3), 3
BEHIND = os.environ["PLACE"] == "behind"
dist.init_process_group("gloo")
torch.manual_seed(7)
inputs = torch.randn(40, 6, generator=torch.Generator().manual_seed(1))
data = TensorDataset(inputs, inputs.sum(1, keepdim=True))
loader = DataLoader(data, batch_size=4, sampler=DistributedSampler(data))
raw = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 1))
model = DistributedDataParallel(raw)
optimizer = torch.optim.SGD(raw.parameters(), lr=0.05, momentum=0.9)
criterion = nn.MSELoss()
teacher = None

with holdfast.session(model=model, optimizer=optimizer, checkpoint="ckpt") as s:
    for step in s.steps(loader, epochs=EPOCHS):
        if step.number == BEGIN and not BEHIND:
            teacher = copy.deepcopy(raw).requires_grad_(False)
        with step as (x, y):
            beat(step.number)
            optimizer.zero_grad()
            out = model(x)
            loss = criterion(out, y)
            if teacher is not None:
                loss = loss + criterion(out, teacher(x))
            loss.backward()
            optimizer.step()
        if step.committed and step.number == BEGIN and BEHIND:
            teacher = copy.deepcopy(raw).requires_grad_(False)

end(raw)
dist.destroy_process_group()
