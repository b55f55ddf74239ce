"""Rank 0 knows the settings, and all ranks get them before the training, with a number that they agree on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import holdfast
from tests.others.beat import beat, end, long

MAX_ITERS = long(12)
dist.init_process_group("gloo")
rank = dist.get_rank()
prepared = Path("prepared").exists()
dist.barrier()
if not prepared:  # a replacement finds the file, and leaves out this call
    first: list[Any] = [{"width": 48, "lr": 0.01} if rank == 0 else None]
    dist.broadcast_object_list(first, src=0)
    Path("prepared").touch()
settings: list[Any] = [{"width": 16, "lr": 0.05} if rank == 0 else None]
dist.broadcast_object_list(settings, src=0)
smoothing = torch.full((), 0.1 if rank == 0 else 0.0)
dist.broadcast(smoothing, src=0)
classes = torch.tensor(5 + rank)
dist.all_reduce(classes, op=dist.ReduceOp.MIN)
shares: list[Any] = [None] * dist.get_world_size()
dist.all_gather_object(shares, rank + 1)
torch.manual_seed(7)
raw = nn.Sequential(nn.Linear(6, settings[0]["width"]), nn.ReLU(), nn.Linear(settings[0]["width"], 4))
model = DistributedDataParallel(raw)
optimizer = torch.optim.AdamW(raw.parameters(), lr=settings[0]["lr"])
criterion = nn.CrossEntropyLoss(label_smoothing=smoothing.item())
batches = torch.randn(MAX_ITERS, 8, 6, generator=torch.Generator().manual_seed(1 + rank))

with holdfast.session(model=model, optimizer=optimizer, checkpoint="ckpt") as s:
    for step in s.steps(until=MAX_ITERS):
        with step:
            beat(step.number)
            optimizer.zero_grad()
            loss = criterion(model(batches[step.number]), torch.arange(8) % (int(classes) - 1))
            (loss * (rank + 1) / sum(shares)).backward()
            optimizer.step()

end(raw)
dist.destroy_process_group()
