"""After each third block, all ranks sum their losses for a log; a rank is lost just before."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import holdfast
from tests.others.beat import beat, end

dist.init_process_group("gloo")
torch.manual_seed(7)
raw = nn.Linear(8, 1)
model = DistributedDataParallel(raw)
optimizer = torch.optim.SGD(raw.parameters(), lr=0.1)

with holdfast.session(model=model, optimizer=optimizer, checkpoint="ckpt") as s:
    for step in s.steps(until=12):
        with step:
            optimizer.zero_grad()
            loss = model(torch.randn(4, 8)).square().mean()
            loss.backward()
            optimizer.step()
        if step.committed:
            beat(step.number)
            if step.number % 3 == 2:
                total = loss.detach().clone()
                dist.all_reduce(total)
                print(f"step {step.number}: loss {float(total):.3f}")

end(raw)
dist.destroy_process_group()
