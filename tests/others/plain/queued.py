"""Each rank compares its batches with a queue of features from its earlier batches. Prototypes are normalized."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from tests.others.beat import beat, end, long

EPOCHS, QUEUE, SIZE = long(3), 8, 8


class Clusters(nn.Module):
    """An encoder, and the similarity of its features with prototypes."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(6, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, SIZE))
        self.prototypes = nn.Linear(SIZE, 5, bias=False)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return features, and their scores for each prototype."""
        features = functional.normalize(self.encoder(x), dim=1)
        return features, self.prototypes(features)

    @torch.no_grad()
    def normalize(self) -> None:
        """Give each prototype the length 1."""
        self.prototypes.weight.copy_(functional.normalize(self.prototypes.weight, dim=1))


@torch.no_grad()
def assigned(scores: torch.Tensor) -> torch.Tensor:
    """Return the share of each prototype in each sample, so that all ranks together use all prototypes equally."""
    shares = torch.exp(scores / 0.2).t()
    for _ in range(3):
        rows = shares.sum(dim=1, keepdim=True)
        dist.all_reduce(rows)
        shares /= rows
        shares /= shares.sum(dim=0, keepdim=True)
    return shares.t()


dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(7)
inputs = torch.randn(40, 6, generator=torch.Generator().manual_seed(1))
data = TensorDataset(inputs, inputs + 0.1)
sampler = DistributedSampler(data)  # type: ignore[var-annotated]
loader = DataLoader(data, batch_size=4, sampler=sampler)
raw = Clusters()
raw.normalize()
model = DistributedDataParallel(raw)
optimizer = torch.optim.SGD(raw.parameters(), lr=0.05, momentum=0.9)
queue = torch.zeros(QUEUE, SIZE)

number = 0
for epoch in range(EPOCHS):
    sampler.set_epoch(epoch)
    for x, other in loader:
        beat(number)
        features, scores = model(torch.cat([x, other]))
        known = functional.linear(queue, raw.prototypes.weight.detach())
        shares = assigned(torch.cat([known, scores[: len(x)].detach()]))[-len(x) :]
        queue.copy_(torch.cat([features[: len(x)].detach(), queue[: -len(x)]]))
        loss = -(shares * functional.log_softmax(scores[len(x) :] / 0.1, dim=1)).sum(dim=1).mean()
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        raw.normalize()
        number += 1

end(raw)
dist.destroy_process_group()
