"""Rows of classes on each rank, outside of DDP, and another optimizer for them; ``FORM`` says what the session knows.

``optimizer``: the rows in ``state=``, and not their optimizer. ``state``: both in ``state=``. ``model``: both as a
model and an optimizer, but without a declaration.
"""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import holdfast
from tests.others.beat import beat, end

dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
torch.manual_seed(7)
backbone = DistributedDataParallel(nn.Linear(6, 4))
rows = nn.Linear(4, 5)
optimizer = torch.optim.SGD(backbone.parameters(), lr=0.05)
other = torch.optim.SGD(rows.parameters(), lr=0.05, momentum=0.9)

arguments: dict[str, Any] = {
    "optimizer": {"model": backbone, "optimizer": optimizer, "state": {"rows": rows}},
    "state": {"model": backbone, "optimizer": optimizer, "state": {"rows": rows, "other": other}},
    "model": {
        "model": {"backbone": backbone, "rows": rows},
        "optimizer": {"backbone": optimizer, "rows": other},
    },
}[os.environ["FORM"]]
with holdfast.session(checkpoint="ckpt", **arguments) as s:
    for step in s.steps(until=12):
        with step:
            beat(step.number)
            x = torch.randn(8, 6)
            scores = rows(backbone(x))
            loss = functional.cross_entropy(scores, torch.randint(5, (8,)) * (1 + rank) % 5)
            optimizer.zero_grad()
            other.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            other.step()

end(backbone, rows)
dist.destroy_process_group()
