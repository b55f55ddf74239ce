"""Reinforcement learning: each game is played before the block of its first part, from where the last one has ended."""

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
place = torch.full((3,), float(rank + 1))

with holdfast.session(model=model, optimizer=optimizer, checkpoint="ckpt") as s:
    for step in s.steps(until=STEPS):
        part = step.number % PARTS
        if part == 0 and not step.again:
            moves = []
            for _ in range(16):
                moves.append(place)
                with torch.no_grad():
                    place = 0.9 * place + raw(place) + torch.randn(3)
            seen = torch.stack(moves)
        beat(step.number)
        with step:
            chosen = seen[part * 4 : part * 4 + 4]
            optimizer.zero_grad()
            criterion(model(chosen), chosen.sum(1, keepdim=True)).backward()
            optimizer.step()

end(raw)
dist.destroy_process_group()
