"""An object in ``state=`` whose ``state_dict()`` leaves out a value on which the loss depends."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import holdfast
from tests.others.beat import beat, end, long

EPOCHS = long(3)
KEPT = os.environ.get("PLACE") == "kept"


class Progress:
    """What the training has seen, and the weight of its second loss."""

    def __init__(self) -> None:
        self.seen, self.weight = 0, 1.0

    def state_dict(self) -> dict[str, Any]:
        """Return the samples seen."""
        return {"samples": self.seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue with ``state``."""
        self.seen = state["samples"]


class Whole:
    """The state of both values of another object."""

    def __init__(self, of: Progress) -> None:
        self.of = of

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the object, and its weight."""
        return {"progress": self.of.state_dict(), "second": self.of.weight}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue with ``state``."""
        self.of.load_state_dict(state["progress"])
        self.of.weight = state["second"]


dist.init_process_group("gloo")
torch.manual_seed(7)
inputs = torch.randn(40, 6, generator=torch.Generator().manual_seed(1))
data = TensorDataset(inputs, inputs.sum(1, keepdim=True))
sampler = DistributedSampler(data)  # type: ignore[var-annotated]
loader = DataLoader(data, batch_size=4, sampler=sampler)
raw = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 1))
model = DistributedDataParallel(raw)
optimizer = torch.optim.SGD(raw.parameters(), lr=0.05, momentum=0.9)
criterion = nn.MSELoss()
progress = Progress()
state = {"progress": Whole(progress) if KEPT else progress}

with holdfast.session(model=model, optimizer=optimizer, checkpoint="ckpt", state=state) as s:
    for step in s.steps(loader, epochs=EPOCHS):
        with step as (x, y):
            beat(step.number)
            optimizer.zero_grad()
            out = model(x)
            loss = criterion(out, y) + progress.weight * out.abs().mean()
            loss.backward()
            optimizer.step()
        if step.committed:
            progress.weight *= 0.9
            progress.seen += 4

end(raw)
dist.destroy_process_group()
