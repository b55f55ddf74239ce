"""A key encoder follows the query encoder in each forward pass, which also fills a queue with the keys of all ranks.

Its first layer is not trained (MoCo v3): the key encoder averages a weight with the shape of no trained one.
"""

from __future__ import annotations

import copy

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import holdfast
from tests.others.beat import beat, end, long

EPOCHS, QUEUE = long(3), 16


class Contrast(nn.Module):
    """A query encoder, a key encoder that follows it, and a queue of keys."""

    queue: torch.Tensor
    place: torch.Tensor

    def __init__(self, query: nn.Module, size: int) -> None:
        super().__init__()
        self.query = query
        self.key = copy.deepcopy(query).requires_grad_(False)
        self.register_buffer("queue", functional.normalize(torch.randn(size, QUEUE), dim=0))
        self.register_buffer("place", torch.zeros(1, dtype=torch.long))

    @torch.no_grad()
    def keys(self, x: torch.Tensor) -> torch.Tensor:
        """Move the key encoder toward the query encoder, and return the keys of a batch that the ranks have mixed."""
        for new, kept in zip(self.query.parameters(), self.key.parameters(), strict=True):
            kept.data = kept.data * 0.9 + new.data * 0.1
        everything = self.gathered(x)
        order = torch.randperm(len(everything))
        dist.broadcast(order, src=0)
        mine = order.view(dist.get_world_size(), -1)[dist.get_rank()]
        mixed = self.gathered(functional.normalize(self.key(everything[mine]), dim=1))
        back = torch.argsort(order).view(dist.get_world_size(), -1)[dist.get_rank()]
        return mixed[back]

    @torch.no_grad()
    def enqueue(self, keys: torch.Tensor) -> None:
        """Replace the oldest keys of the queue."""
        everything, at = self.gathered(keys), int(self.place)
        self.queue[:, at : at + len(everything)] = everything.T
        self.place[0] = (at + len(everything)) % QUEUE

    @staticmethod
    def gathered(x: torch.Tensor) -> torch.Tensor:
        """Return the rows of all ranks."""
        parts = [torch.ones_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, x.contiguous())
        return torch.cat(parts)

    def forward(self, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        """Return the similarity of each query with its key and with the queue."""
        queries, keys = functional.normalize(self.query(x), dim=1), self.keys(other)
        known = torch.einsum("nc,nc->n", queries, keys).unsqueeze(1)
        scores = torch.cat([known, queries @ self.queue.clone().detach()], dim=1) / 0.2
        self.enqueue(keys)
        return scores


dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(7)
inputs = torch.randn(40, 6, generator=torch.Generator().manual_seed(1))
data = TensorDataset(inputs, inputs + 0.1)
sampler = DistributedSampler(data)  # type: ignore[var-annotated]
loader = DataLoader(data, batch_size=4, sampler=sampler)
stem = nn.Linear(6, 720).requires_grad_(False)
encoder = nn.Sequential(stem, nn.BatchNorm1d(720), nn.ReLU(), nn.Linear(720, 8))
raw = Contrast(encoder, 8)
stem.weight.data.mul_(0.5)  # the first layer of the key encoder follows in the next steps
model = DistributedDataParallel(raw)
optimizer = torch.optim.SGD(raw.parameters(), lr=0.05, momentum=0.9)
criterion = nn.CrossEntropyLoss()

with holdfast.session(model=model, optimizer=optimizer, checkpoint="ckpt") as s:
    for step in s.steps(loader, epochs=EPOCHS):
        with step as (x, other):
            beat(step.number)
            scores = model(x, other)
            loss = criterion(scores, torch.zeros(len(scores), dtype=torch.long))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

end(raw)
dist.destroy_process_group()
