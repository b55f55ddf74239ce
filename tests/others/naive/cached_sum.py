"""A divisor of the loss that the first block sums over the ranks, and later blocks use again (a lazy statistic).

PLACE ``each``: each block makes the sum, and the first one keeps it.
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import holdfast
from tests.others.beat import end, long

EPOCHS = long(2)
PLACE = os.environ["PLACE"]
dist.init_process_group("gloo")
torch.manual_seed(7)
inputs = torch.randn(40, 6, generator=torch.Generator().manual_seed(1))
data = TensorDataset(inputs, inputs.sum(1, keepdim=True))
sampler = DistributedSampler(data)  # type: ignore[var-annotated]
loader = DataLoader(data, batch_size=4, sampler=sampler)
raw = nn.Linear(6, 1)
model = DistributedDataParallel(raw)
optimizer = torch.optim.SGD(raw.parameters(), lr=0.05, momentum=0.9)


class Normalized:
    """A squared error, divided by the mean square of the first targets of all ranks."""

    def __init__(self) -> None:
        self.divisor: float | None = None

    def __call__(self, out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Return the error."""
        if self.divisor is None or PLACE == "each":
            square = y.square().mean()
            squares = [0.0] * dist.get_world_size()
            if PLACE == "objects":
                dist.all_gather_object(squares, square.item())
            else:
                dist.all_reduce(square)
                squares = [square.item()]
            self.divisor = self.divisor or sum(squares) / dist.get_world_size()
        return (out - y).square().mean() / self.divisor


criterion = Normalized()
with holdfast.session(model=model, optimizer=optimizer, checkpoint="ckpt") as s:
    for step in s.steps(loader, epochs=EPOCHS):
        with step as (x, y):
            optimizer.zero_grad()
            loss = criterion(model(x), y)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()

end(raw)
dist.destroy_process_group()
