"""A mean of the losses of one rank, in the state of the session, and in the loss: a StyleGAN2 mean path length."""

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
PLACE = os.environ["PLACE"]
LATE = 5 if PLACE == "late" else -1  # after this step the ranks have values of their own


class Mean:
    """A mean that an object keeps."""

    def __init__(self) -> None:
        self.mean = 0.0

    def add(self, value: float) -> None:
        """Move the mean towards ``value``."""
        self.mean += 0.1 * (value - self.mean)

    def state_dict(self) -> dict[str, float]:
        """Return the mean."""
        return {"mean": self.mean}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Set the mean."""
        self.mean = state["mean"]


dist.init_process_group("gloo")
torch.manual_seed(7)
inputs = torch.randn(40, 6, generator=torch.Generator().manual_seed(1))
data = TensorDataset(inputs, inputs.sum(1, keepdim=True))
sampler = DistributedSampler(data)  # type: ignore[var-annotated]
loader = DataLoader(data, batch_size=4, sampler=sampler)
raw = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 1))
model = DistributedDataParallel(raw)
optimizer = torch.optim.SGD(raw.parameters(), lr=0.002, momentum=0.9)
criterion = nn.MSELoss()
kept, mean, moved = {"mean": 0.0}, Mean(), torch.zeros(())
state: dict[str, Any] = {"kept": kept, "object": mean, "tensor": moved, "entry": 0.0}

with holdfast.session(model=model, optimizer=optimizer, state=state, checkpoint="ckpt") as s:
    for step in s.steps(loader, epochs=EPOCHS):
        with step as (x, y):
            beat(step.number)
            optimizer.zero_grad()
            loss = criterion(model(x), y)
            if PLACE in ("dict", "late") and step.number > LATE:
                kept["mean"] += 0.1 * (loss.item() - kept["mean"])
            if PLACE == "object":
                mean.add(loss.item())
            if PLACE == "tensor":
                moved.lerp_(loss.detach(), 0.1)
            if PLACE == "entry":
                s.state["entry"] += 0.1 * (loss.item() - s.state["entry"])
            goal = kept["mean"] + mean.mean + moved + s.state["entry"]
            (loss + (loss - goal).square()).backward()
            optimizer.step()

end(raw)
dist.destroy_process_group()
