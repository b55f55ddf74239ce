"""Reinforcement learning with one block for each part of what was seen, in tensors that the script fills before."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import holdfast
from tests.others.beat import beat, end, long

PARTS, STEPS = 4, long(16)
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(7)
raw = nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, 1))
model = DistributedDataParallel(raw)
optimizer = torch.optim.Adam(raw.parameters(), lr=1e-2)
criterion = nn.MSELoss()
seen, rewards = torch.zeros(16, 3), torch.zeros(16, 1)

with holdfast.session(model=model, optimizer=optimizer, checkpoint="ckpt") as s:
    for step in s.steps(until=STEPS):
        part = step.number % PARTS
        if part == 0 and not step.again:
            games = torch.Generator().manual_seed(1000 * rank + step.number)
            for move in range(len(seen)):
                seen[move] = torch.randn(3, generator=games)
                rewards[move] = seen[move].sum()
        with step:
            beat(step.number)
            chosen = slice(part * 4, part * 4 + 4)
            optimizer.zero_grad()
            criterion(model(seen[chosen]), rewards[chosen]).backward()
            optimizer.step()

end(raw)
dist.destroy_process_group()
