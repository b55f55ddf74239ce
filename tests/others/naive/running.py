"""FSDP2, with a count of tokens that is reset after the update, and by which the gradients are scaled.

The count is in a ``ContextVar``, in which the search for variables does not look.
"""

from __future__ import annotations

from contextvars import ContextVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import holdfast
from tests.others.beat import end, long

EPOCHS = long(3)
dist.init_process_group("gloo")
torch.manual_seed(7)
inputs = torch.randn(40, 6, generator=torch.Generator().manual_seed(1))
data = TensorDataset(inputs, inputs.sum(1, keepdim=True))
sampler = DistributedSampler(data)  # type: ignore[var-annotated]
loader = DataLoader(data, batch_size=4, sampler=sampler)
model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 1))
fully_shard(model[0])
fully_shard(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
criterion = nn.MSELoss(reduction="sum")
tokens: ContextVar[torch.Tensor] = ContextVar("tokens")
tokens.set(torch.zeros(()))

with holdfast.session(model=model, optimizer=optimizer, checkpoint="ckpt", memory=1) as s:
    for step in s.steps(loader, epochs=EPOCHS):
        with step as (x, y):
            optimizer.zero_grad()
            count = tokens.get()
            count += len(x)
            loss = criterion(model(x), y)
            loss.backward()
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter.grad /= count
            optimizer.step()
        if step.committed:
            tokens.set(torch.zeros(()))

end(model)
dist.destroy_process_group()
