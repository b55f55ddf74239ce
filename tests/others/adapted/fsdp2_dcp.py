"""FSDP2, with checkpoints by the state-dict API of torch.distributed.checkpoint."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.fsdp import fully_shard
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
model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 1))
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
criterion = nn.MSELoss()

with holdfast.session(model=model, optimizer=optimizer, checkpoint="ckpt", memory=1) as s:
    for epoch in s.epochs(EPOCHS):
        for step in s.steps(loader):
            with step as (x, y):
                beat(step.number)
                optimizer.zero_grad()
                loss = criterion(model(x), y)
                loss.backward()
                optimizer.step()
        weights, moments = get_state_dict(model, optimizer)
        dcp.save({"weights": weights, "moments": moments}, checkpoint_id=f"epoch-{epoch}")  # type: ignore[attr-defined]

end(model)
dist.destroy_process_group()
