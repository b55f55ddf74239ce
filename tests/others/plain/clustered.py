"""Each epoch begins with a clustering of features from the epoch before. Centers become prototypes (DeepCluster)."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from tests.others.beat import beat, end, long

EPOCHS, SAMPLES, CLUSTERS, SIZE = long(3), 40, 5, 6


class Clusters(nn.Module):
    """An encoder, and the similarity of its features with prototypes."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, SIZE))
        self.prototypes = nn.Linear(SIZE, CLUSTERS, bias=False)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return features, and their scores for each prototype."""
        features = functional.normalize(self.encoder(x), dim=1)
        return features, self.prototypes(features)


@torch.no_grad()
def clustered(raw: Clusters, bank: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Set the prototypes to the centers of the features of all ranks. Return the cluster of each sample."""
    gathered = [[torch.empty_like(part) for _ in range(dist.get_world_size())] for part in (bank, index)]
    dist.all_gather(gathered[0], bank)
    dist.all_gather(gathered[1], index)
    features = torch.zeros(SAMPLES, SIZE)
    features[torch.cat(gathered[1])] = torch.cat(gathered[0])
    centers = features[torch.randperm(SAMPLES)[:CLUSTERS]]
    for _ in range(3):
        nearest = (features @ centers.t()).argmax(dim=1)
        sums = functional.one_hot(nearest, CLUSTERS).float().t() @ features
        centers = functional.normalize(sums + 0.01 * centers, dim=1)
    raw.prototypes.weight.copy_(centers)
    return nearest


dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
torch.manual_seed(7)
inputs = torch.randn(SAMPLES, 6, generator=torch.Generator().manual_seed(1))
data = TensorDataset(inputs, torch.arange(SAMPLES))
sampler = DistributedSampler(data)  # type: ignore[var-annotated]
loader = DataLoader(data, batch_size=4, sampler=sampler)
raw = Clusters()
model = DistributedDataParallel(raw)
optimizer = torch.optim.SGD(raw.parameters(), lr=0.05, momentum=0.9)
index = torch.arange(rank, SAMPLES, ranks)
bank = functional.normalize(inputs[index], dim=1)

number = 0
for epoch in range(EPOCHS):
    sampler.set_epoch(epoch)
    assigned = clustered(raw, bank, index)
    for at, (x, samples) in enumerate(loader):
        beat(number)
        features, scores = model(x)
        loss = functional.cross_entropy(scores / 0.1, assigned[samples])
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        bank[4 * at : 4 * at + len(x)] = features.detach()
        index[4 * at : 4 * at + len(x)] = samples
        number += 1

end(raw)
dist.destroy_process_group()
