"""An early stop by an object that counts the epochs without a better evaluation, and that the session does not have."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import holdfast
from tests.others.beat import beat, end


class Patience:
    """Says when to stop: after ``limit`` evaluations in a row that are not better than the best one."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.best = math.inf
        self.waited = 0
        self.stop = False

    def __call__(self, loss: float) -> None:
        """Take the result of an evaluation."""
        if loss < self.best:
            self.best = loss
            self.waited = 0
        else:
            self.waited += 1
            if self.waited >= self.limit:
                self.stop = True


def evaluate() -> float:
    """Return the mean loss of other samples over all ranks."""
    with torch.no_grad():
        total = criterion(raw(others), others.sum(1, keepdim=True) + noise)
    dist.all_reduce(total)
    return float(total)


dist.init_process_group("gloo")
torch.manual_seed(7)
generator = torch.Generator().manual_seed(1)
inputs = torch.randn(40, 6, generator=generator)
others, noise = torch.randn(20, 6, generator=generator), torch.randn(20, 1, generator=generator)
data = TensorDataset(inputs, inputs.sum(1, keepdim=True) + torch.randn(40, 1, generator=generator))
loader = DataLoader(data, batch_size=4, sampler=DistributedSampler(data))
raw = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 1))
model = DistributedDataParallel(raw)
optimizer = torch.optim.Adam(raw.parameters(), lr=0.05)
criterion = nn.MSELoss()
patience = Patience(3)

with holdfast.session(model=model, optimizer=optimizer, checkpoint="ckpt") as s:
    for _epoch in s.epochs(30):
        for step in s.steps(loader):
            with step as (x, y):
                beat(step.number)
                optimizer.zero_grad()
                criterion(model(x), y).backward()
                optimizer.step()
        patience(evaluate())
        if patience.stop:
            break

end(raw)
dist.destroy_process_group()
