"""A forward hook collects activations in a list for a penalty. The ranks gather their batch sizes as objects."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from tests.others.beat import beat, end, long

EPOCHS = long(3)
dist.init_process_group("gloo")
torch.manual_seed(7)
inputs = torch.randn(40, 6, generator=torch.Generator().manual_seed(1))
data = TensorDataset(inputs, inputs + 0.1)
sampler = DistributedSampler(data)  # type: ignore[var-annotated]
loader = DataLoader(data, batch_size=4, sampler=sampler)
raw = nn.Sequential(nn.Linear(6, 48), nn.ReLU(), nn.Linear(48, 8))
activations: list[torch.Tensor] = []


def keep(module: nn.Module, given: Any, output: torch.Tensor) -> None:
    """Keep the output of a layer until the loss uses it."""
    activations.append(output)


raw[1].register_forward_hook(keep)
model = DistributedDataParallel(raw)
optimizer = torch.optim.AdamW(raw.parameters(), lr=1e-2)


def contrast(features: torch.Tensor) -> torch.Tensor:
    """Return the contrastive loss of the pairs in one batch, weighted by its part in the batches of all ranks."""
    one, other = functional.normalize(features, dim=1).chunk(2)
    sizes: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(sizes, len(one))
    part: float = len(one) * len(sizes) / sum(sizes)
    return part * functional.cross_entropy(one @ other.T * 10, torch.arange(len(one)))


number = 0
for epoch in range(EPOCHS):
    sampler.set_epoch(epoch)
    for x, other in loader:
        beat(number)
        optimizer.zero_grad()
        loss = contrast(model(torch.cat([x, other])))
        loss = loss + 0.1 * torch.stack([kept.square().mean() for kept in activations]).sum()
        activations.clear()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        number += 1

end(raw)
dist.destroy_process_group()
