"""A schedule follows the mean loss of each epoch, which a function sums up in a local variable.

``KEPT=1``: the sum is kept by ``s.attach``. ``FORM=meter``: an object has the sum. ``FORM=inline``: it is a tensor, a
variable of the loop over epochs.
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import holdfast
from tests.others.beat import beat, end


def loss_of(x: torch.Tensor, y: torch.Tensor, number: int) -> torch.Tensor:
    """Make the update of step ``number``, and return its loss."""
    beat(number)
    optimizer.zero_grad()
    loss = criterion(model(x), y)
    loss.backward()
    optimizer.step()
    value: torch.Tensor = loss.detach()
    return value


def epoch_in_function() -> float:
    """Train an epoch, and return the mean loss of this rank."""
    sums = {"loss": 0.0}
    if "KEPT" in os.environ:
        sums = s.attach("train", sums)
    for step in s.steps(loader):
        with step as (x, y):
            loss = loss_of(x, y, step.number)
        if step.committed:
            sums["loss"] += float(loss)
    return sums["loss"] / len(loader)


class Meter:
    """The mean of values."""

    def __init__(self) -> None:
        self.sum, self.count, self.mean = 0.0, 0, 0.0

    def update(self, value: float) -> None:
        """Add a value."""
        self.sum += value
        self.count += 1
        self.mean = self.sum / self.count


def epoch_with_meter() -> float:
    """Train an epoch, and return the mean loss of this rank."""
    meter = Meter()
    for step in s.steps(loader):
        with step as (x, y):
            loss = loss_of(x, y, step.number)
        if step.committed:
            meter.update(float(loss))
    return meter.mean


def mean_of_ranks(value: torch.Tensor) -> torch.Tensor:
    """Return the mean over the ranks."""
    dist.all_reduce(value)
    return value / dist.get_world_size()


dist.init_process_group("gloo")
torch.manual_seed(7)
generator = torch.Generator().manual_seed(1)
inputs = torch.randn(40, 6, generator=generator)
data = TensorDataset(inputs, torch.randn(40, 1, generator=generator))
loader = DataLoader(data, batch_size=4, sampler=DistributedSampler(data))
raw = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 1))
model = DistributedDataParallel(raw)
optimizer = torch.optim.Adam(raw.parameters(), lr=0.01)
plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.2)
criterion = nn.MSELoss()

with holdfast.session(model=model, optimizer=optimizer, scheduler=plateau, checkpoint="ckpt") as s:
    for _epoch in s.epochs(5):
        if os.environ.get("FORM") == "meter":
            mean = mean_of_ranks(torch.tensor(epoch_with_meter()))
        elif os.environ.get("FORM") != "inline":
            mean = mean_of_ranks(torch.tensor(epoch_in_function()))
        else:
            total = torch.zeros(1)
            for step in s.steps(loader):
                with step as (x, y):
                    loss = loss_of(x, y, step.number)
                    total[0] += loss
            mean = mean_of_ranks(total / len(loader))
        plateau.step(float(mean))

end(raw)
dist.destroy_process_group()
