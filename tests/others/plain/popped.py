"""The labels are removed from the batch, a dict."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from tests.others.beat import beat, end, long

Row = tuple[torch.Tensor, torch.Tensor]


def named(rows: list[Row]) -> dict[str, torch.Tensor]:
    """Return the batch as a dict."""
    x, y = zip(*rows, strict=True)
    return {"x": torch.stack(x), "labels": torch.stack(y)}


EPOCHS = long(3)
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(7)
inputs = torch.randn(40, 6, generator=torch.Generator().manual_seed(1))
data = TensorDataset(inputs, inputs.sum(1, keepdim=True))
sampler = DistributedSampler(data)  # type: ignore[var-annotated]
loader = DataLoader(data, batch_size=4, sampler=sampler, collate_fn=named)
raw = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 1))
model = DistributedDataParallel(raw)
optimizer = torch.optim.SGD(raw.parameters(), lr=0.05, momentum=0.9)
criterion = nn.MSELoss()

number = 0
for epoch in range(EPOCHS):
    sampler.set_epoch(epoch)
    for batch in loader:
        beat(number)
        y = batch.pop("labels")
        x = batch.pop("x")
        optimizer.zero_grad()
        loss = criterion(model(x), y)
        loss.backward()
        optimizer.step()
        number += 1

end(raw)
dist.destroy_process_group()
