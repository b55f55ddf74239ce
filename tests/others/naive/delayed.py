"""The script ``delayed``, whose counter is in a file of each process: a replacement counts from 0.

Environment variable PLACE: ``behind``: the slow optimizer steps after the vote. ``before``: it steps first. ``rate``:
the counter decides about a learning rate. ``named``: the same, in a named update. ``momentum``: it decides about a
momentum.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import holdfast
from tests.others.beat import beat, end, long

EPOCHS = long(3)
PLACE = os.environ["PLACE"]
COUNT = Path(f"waited-{os.getpid()}")  # the search in the source does not find a count in a file
dist.init_process_group("gloo")
torch.manual_seed(7)
inputs = torch.randn(40, 6, generator=torch.Generator().manual_seed(1))
data = TensorDataset(inputs, inputs.sum(1, keepdim=True))
sampler = DistributedSampler(data)  # type: ignore[var-annotated]
loader = DataLoader(data, batch_size=4, sampler=sampler)
body = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Dropout(0.1))
head = nn.Linear(16, 1)
fully_shard(body)
fully_shard(head)
fast = torch.optim.SGD(head.parameters(), lr=0.05, momentum=0.9)
slow = torch.optim.SGD(body.parameters(), lr=0.05, momentum=0.9)
criterion = nn.MSELoss()
COUNT.write_text("0")


def waited() -> int:
    """Return the number of steps since the slow optimizer has stepped."""
    return int(COUNT.read_text())


with holdfast.session(
    model={"body": body, "head": head},
    optimizer={"fast": fast, "slow": slow},
    checkpoint="ckpt",
    memory=1,
) as s:
    for step in s.steps(loader, epochs=EPOCHS):
        with step as (x, y):
            beat(step.number)
            fast.zero_grad()
            slow.zero_grad()
            criterion(head(body(x)), y).backward()
            if PLACE in ("rate", "named"):
                fast.param_groups[0]["lr"] = 0.01 * (1 + waited())
            if PLACE == "momentum":
                fast.param_groups[0]["momentum"] = 0.9 - 0.1 * waited()
            if PLACE == "behind":
                fast.step()
            if waited() >= 2 and PLACE in ("behind", "before"):
                slow.step()
            if PLACE == "named":
                with step.update("first"):
                    fast.step()
            elif PLACE != "behind":
                fast.step()
        if step.committed:
            COUNT.write_text(str(0 if waited() >= 2 else waited() + 1))

end(nn.ModuleList([body, head]), waited=waited())
dist.destroy_process_group()
