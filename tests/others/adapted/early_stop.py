"""Training ends when the loss has not fallen for some steps."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import holdfast
from tests.others.beat import beat, end, long

EPOCHS = long(3)
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(7)
inputs = torch.randn(40, 6, generator=torch.Generator().manual_seed(1))
data = TensorDataset(inputs, inputs.sum(1, keepdim=True))
sampler = DistributedSampler(data)  # type: ignore[var-annotated]
loader = DataLoader(data, batch_size=4, sampler=sampler)
raw = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 1))
model = DistributedDataParallel(raw)
optimizer = torch.optim.SGD(raw.parameters(), lr=0.05, momentum=0.9)
criterion = nn.MSELoss()
best = {"loss": math.inf, "waited": 0}

with holdfast.session(model=model, optimizer=optimizer, checkpoint="ckpt", state={"best": best}) as s:
    for step in s.steps(loader, epochs=EPOCHS):
        if best["waited"] > 3:
            break
        with step as (x, y):
            beat(step.number)
            optimizer.zero_grad()
            loss = criterion(model(x), y)
            loss.backward()
            mean = loss.detach().clone()
            dist.all_reduce(mean)
            optimizer.step()
        if step.committed:
            if mean.item() < best["loss"]:
                best["loss"], best["waited"] = mean.item(), 0
            else:
                best["waited"] += 1

end(raw, **best)
dist.destroy_process_group()
