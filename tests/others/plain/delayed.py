"""FSDP2 with two optimizers: one of them steps when three updates of the other have come since its last one."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from tests.others.beat import beat, end, long

EPOCHS = long(3)
dist.init_process_group("gloo")
torch.manual_seed(7)
inputs = torch.randn(40, 6, generator=torch.Generator().manual_seed(1))
data = TensorDataset(inputs, inputs.sum(1, keepdim=True))
sampler = DistributedSampler(data)  # type: ignore[var-annotated]
loader = DataLoader(data, batch_size=4, sampler=sampler)
body = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Dropout(0.1))
head = nn.Linear(16, 1)
fully_shard(body)
fully_shard(head)
fast = torch.optim.SGD(head.parameters(), lr=0.05, momentum=0.9)
slow = torch.optim.SGD(body.parameters(), lr=0.05, momentum=0.9)
criterion = nn.MSELoss()
waited = 0

number = 0
for epoch in range(EPOCHS):
    sampler.set_epoch(epoch)
    for x, y in loader:
        beat(number)
        fast.zero_grad()
        slow.zero_grad()
        criterion(head(body(x)), y).backward()
        fast.step()
        if waited >= 2:
            slow.step()
        waited = 0 if waited >= 2 else waited + 1
        number += 1

end(nn.ModuleList([body, head]), waited=waited)
dist.destroy_process_group()
