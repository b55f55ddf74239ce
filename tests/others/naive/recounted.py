"""A learning rate that follows a count of steps, which begins at the epoch of the script's own file."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import holdfast
from tests.others.beat import beat, end, long

EPOCHS = long(3)
FILE = Path("epoch.txt")
dist.init_process_group("gloo")
torch.manual_seed(7)
inputs = torch.randn(40, 6, generator=torch.Generator().manual_seed(1))
data = TensorDataset(inputs, inputs.sum(1, keepdim=True))
sampler = DistributedSampler(data)  # type: ignore[var-annotated]
loader = DataLoader(data, batch_size=4, sampler=sampler)
raw = nn.Linear(6, 1)
model = DistributedDataParallel(raw)
optimizer = torch.optim.SGD(raw.parameters(), lr=0.05, momentum=0.9)
criterion = nn.MSELoss()
start_epoch = int(FILE.read_text()) if FILE.exists() else 0
count = start_epoch * len(loader)

with holdfast.session(model=model, optimizer=optimizer, checkpoint="ckpt") as s:
    for epoch in s.epochs(EPOCHS):
        for step in s.steps(loader):
            with step as (x, y):
                beat(step.number)
                for group in optimizer.param_groups:
                    group["lr"] = 0.05 * 0.9**count
                optimizer.zero_grad()
                criterion(model(x), y).backward()
                optimizer.step()
            if step.committed:
                count += 1
        if dist.get_rank() == 0:
            FILE.write_text(str(epoch + 1))

end(raw, seen=count)
dist.destroy_process_group()
