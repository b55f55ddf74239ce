"""A count in a plain variable decides about evaluations alone, whose variables have the names of those of the loss."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import holdfast
from tests.others.beat import beat, end, long

EPOCHS = long(3)
dist.init_process_group("gloo")
torch.manual_seed(7)
inputs = torch.randn(40, 6, generator=torch.Generator().manual_seed(1))
data = TensorDataset(inputs, inputs.sum(1, keepdim=True))
sampler = DistributedSampler(data)  # type: ignore[var-annotated]
loader = DataLoader(data, batch_size=4, sampler=sampler)
held_out = DataLoader(data, batch_size=20)
raw = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 1))
model = DistributedDataParallel(raw)
optimizer = torch.optim.SGD(raw.parameters(), lr=0.05, momentum=0.9)
criterion = nn.MSELoss()
steps = 0

with holdfast.session(model=model, optimizer=optimizer, checkpoint="ckpt") as s:
    for _ in s.epochs(EPOCHS):
        for step in s.steps(loader):
            with step as batch:
                beat(step.number)
                x, y = batch
                optimizer.zero_grad()
                out = model(x)
                loss = criterion(out, y)
                loss.backward()
                optimizer.step()
            if not step.committed:
                continue
            if steps % 2 == 0:
                with torch.no_grad():
                    for batch in held_out:
                        x, y = batch
                        out = raw(x)
                        loss = criterion(out, y)
                print(f"step {steps}: {loss.item():.4f}")
            steps += 1

end(raw)
dist.destroy_process_group()
