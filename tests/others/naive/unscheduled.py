"""A schedule of torch that moves after each epoch, and that the session does not have."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import holdfast
from tests.others.beat import beat, end, long

EPOCHS = long(4)
dist.init_process_group("gloo")
torch.manual_seed(7)
inputs = torch.randn(40, 6, generator=torch.Generator().manual_seed(1))
data = TensorDataset(inputs, inputs.sum(1, keepdim=True))
loader = DataLoader(data, batch_size=4, sampler=DistributedSampler(data))
raw = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 1))
model = DistributedDataParallel(raw)
optimizer = torch.optim.SGD(raw.parameters(), lr=0.05, momentum=0.9)
schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
criterion = nn.MSELoss()

with holdfast.session(model=model, optimizer=optimizer, checkpoint="ckpt") as s:
    for _ in s.epochs(EPOCHS):
        for step in s.steps(loader):
            with step as (x, y):
                beat(step.number)
                optimizer.zero_grad()
                criterion(model(x), y).backward()
                optimizer.step()
        schedule.step()

end(raw)
dist.destroy_process_group()
