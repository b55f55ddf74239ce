"""The block asserts what a collective returned, and uses a table and a place in it that only a broadcast fills."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import holdfast
from tests.others.beat import beat, end, long

MAX_ITERS = long(12)
WRONG_FROM = int(os.environ.get("WRONG_FROM", MAX_ITERS))  # the step from which rank 0 has a sample less
dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
torch.manual_seed(7)
raw = nn.Sequential(*(nn.Linear(16, 16) for _ in range(6)))
model = DistributedDataParallel(raw, bucket_cap_mb=0.002)
optimizer = torch.optim.AdamW(raw.parameters(), lr=1e-2)
data = torch.randn(64, 16)

with holdfast.session(model=model, optimizer=optimizer, checkpoint="ckpt") as s:
    for step in s.steps(until=MAX_ITERS):
        with step:
            beat(step.number)
            number = step.number
            length = torch.zeros((), dtype=torch.int64)
            if rank == 0:
                length.fill_(4 + number % 3)
            dist.broadcast(length, src=0)
            starts = torch.empty(int(length), dtype=torch.int64)
            if rank == 0:
                torch.arange(int(length), out=starts)
            dist.broadcast(starts, src=0)
            x = data[starts * ranks + rank][int(rank == 0 and number >= WRONG_FROM) :]
            samples = torch.tensor(len(x))
            dist.all_reduce(samples)
            assert samples == len(x) * ranks > 0, "a rank has another number of samples"
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        if step.committed and rank == 0:
            print(f"iter {step.number}: loss {loss.item():.4f}")

end(raw)
dist.destroy_process_group()
