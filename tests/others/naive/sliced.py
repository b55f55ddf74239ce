"""The script ``sliced``, with a check of what a collective returned in the block."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import holdfast
from tests.others.beat import beat, end, long

EPOCHS = long(3)
dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
torch.manual_seed(7)
raw = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 4))
model = DistributedDataParallel(raw)
optimizer = torch.optim.AdamW(raw.parameters(), lr=0.05)
data = TensorDataset(torch.randn(48, 6), torch.randint(4, (48,)), torch.arange(48))
loader = DataLoader(data, batch_size=16, shuffle=True)


def train(x: torch.Tensor, y: torch.Tensor, samples: torch.Tensor) -> None:
    """Update the model with this rank's slice of one batch, a random half of which counts."""
    counts = torch.randperm(len(samples)) < len(samples) // 2
    trained = torch.zeros(48)
    trained[samples[counts][rank::ranks]] = 1
    dist.all_reduce(trained)
    assert trained.sum() == counts.sum(), "a sample is missing"
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(x[counts][rank::ranks]), y[counts][rank::ranks])
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()


with holdfast.session(model=model, optimizer=optimizer, checkpoint="ckpt") as s:
    for step in s.steps(loader, epochs=EPOCHS):
        with step as batch:
            beat(step.number)
            train(*batch)

end(raw)
dist.destroy_process_group()
