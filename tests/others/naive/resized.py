"""After each third block, rank 0 broadcasts the size of the next inputs (YOLOX): a lost rank would cut this off."""

from __future__ import annotations

import random

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import holdfast
from tests.others.beat import end

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(7)
raw = nn.Sequential(nn.AdaptiveAvgPool1d(4), nn.Linear(4, 1))
model = DistributedDataParallel(raw)
optimizer = torch.optim.SGD(raw.parameters(), lr=0.1)
kept = {"size": 8}

with holdfast.session(model=model, optimizer=optimizer, checkpoint="ckpt", state={"kept": kept}) as s:
    for step in s.steps(until=12):
        with step:
            optimizer.zero_grad()
            model(torch.randn(4, 2, kept["size"])).square().mean().backward()
            optimizer.step()
        if step.committed:
            if step.number % 3 == 2:
                size = torch.tensor(random.randrange(4, 16))
                dist.broadcast(size, 0)
                kept["size"] = int(size)

end(raw)
dist.destroy_process_group()
