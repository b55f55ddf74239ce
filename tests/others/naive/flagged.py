"""A layer that sets its weights from its first batch (Glow's ActNorm). ``FORM`` says where its flag is.

``attribute``: in an attribute, which begins again in each process. ``buffer``: in a buffer of the module.
"""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import holdfast
from tests.others.beat import beat, end

dist.init_process_group("gloo")
torch.manual_seed(7)


class Normalized(nn.Module):
    """A shift that begins with the mean of the first batch."""

    ready: Any

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(4))
        if os.environ["FORM"] == "buffer":
            self.register_buffer("ready", torch.tensor(False))
        else:
            self.ready = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Shape [n, 4] -> [n, 4]."""
        if not self.ready:
            self.shift.data.copy_(-x.detach().mean(dim=0))
            if isinstance(self.ready, bool):
                self.ready = True
            else:
                self.ready.fill_(True)
        return x + self.shift


raw = nn.Sequential(nn.Linear(6, 4), Normalized(), nn.Linear(4, 2))
model = DistributedDataParallel(raw)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
with holdfast.session(model=model, optimizer=optimizer, checkpoint="ckpt") as s:
    for step in s.steps(until=10):
        with step:
            beat(step.number)
            x = torch.randn(8, 6)
            loss = (model(x) - x[:, :2].sin()).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

end(raw)
dist.destroy_process_group()
