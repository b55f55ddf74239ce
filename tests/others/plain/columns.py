"""Tensor parallel by hand: each rank has columns of one layer and rows of the next; dropout on what all ranks have."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tests.others.beat import beat, end, long

EPOCHS = long(3)
dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
torch.manual_seed(7)


class Shared(torch.autograd.Function):
    """The input of the columns: all ranks have it, and its gradient is the sum of theirs."""

    @staticmethod
    def forward(context: Any, x: torch.Tensor) -> torch.Tensor:
        """Return the input."""
        return x.clone()

    @staticmethod
    def backward(context: Any, *gradients: torch.Tensor) -> torch.Tensor:
        """Return the sum over the ranks."""
        total = gradients[0].clone()
        dist.all_reduce(total)
        return total


class Summed(torch.autograd.Function):
    """The output of the rows: the sum of what the ranks have."""

    @staticmethod
    def forward(context: Any, x: torch.Tensor) -> torch.Tensor:
        """Return the sum over the ranks."""
        total = x.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(context: Any, *gradients: torch.Tensor) -> torch.Tensor:
        """Return the gradient."""
        return gradients[0]


class Block(nn.Module):
    """Two layers in parts between two layers that all ranks have."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 4)
        up, down = torch.randn(16, 8) / 4, torch.randn(8, 16) / 4
        self.up = nn.Parameter(up.chunk(ranks, 0)[rank].clone())
        self.down = nn.Parameter(down.chunk(ranks, 1)[rank].clone())
        self.drop = nn.Dropout(0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the scores, [n, 4], of inputs, [n, 6]."""
        x = self.drop(self.first(x))
        y: torch.Tensor = Shared.apply(x)  # type: ignore[no-untyped-call]
        y = Summed.apply((y @ self.up.T).relu() @ self.down.T)  # type: ignore[no-untyped-call]
        scores: torch.Tensor = self.last(x + self.drop(y))
        return scores


model = Block()
optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
loader = DataLoader(TensorDataset(torch.randn(40, 6), torch.randint(4, (40,))), batch_size=8, shuffle=True)

number = 0
for _ in range(EPOCHS):
    for x, y in loader:
        beat(number)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        number += 1

end(model)
dist.destroy_process_group()
