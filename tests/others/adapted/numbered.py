"""Loops of epochs with numbered batches through a printing helper, averages every second batch, and evaluations."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import holdfast
from tests.others.beat import beat, end, long

EPOCHS = long(3)
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(7)
inputs = torch.randn(40, 6, generator=torch.Generator().manual_seed(1))
data = TensorDataset(inputs, inputs.sum(1, keepdim=True))
sampler = DistributedSampler(data)  # type: ignore[var-annotated]
loader = DataLoader(data, batch_size=4, sampler=sampler)
raw = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 1))
model = DistributedDataParallel(raw)
optimizer = torch.optim.SGD(raw.parameters(), lr=0.05, momentum=0.9)
scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, 1.0, EPOCHS)
criterion = nn.MSELoss()
average = AveragedModel(raw, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)  # type: ignore[no-untyped-call]


def log_every(items: Any, every: int) -> Iterator[Any]:
    """Yield the items, with a line after some of them."""
    for count, item in enumerate(items):
        yield item
        if count % every == 0 and rank == 0:
            print(f"{count} of {len(items)} items")


def evaluate() -> float:
    """Return the loss of the averages over the parts of all ranks."""
    with torch.inference_mode():
        total = criterion(average(inputs[rank::2]), inputs[rank::2].sum(1, keepdim=True))
    dist.all_reduce(total)
    return float(total)


state = {"average": average}
with holdfast.session(
    model=model, optimizer=optimizer, scheduler=scheduler, checkpoint="ckpt", state=state
) as s:
    for epoch in s.epochs(EPOCHS):
        average.train()
        for step in log_every(s.steps(loader), 2):
            number = step.number % len(loader)
            with step as (x, y):
                beat(step.number)
                optimizer.zero_grad()
                criterion(model(x), y).backward()
                optimizer.step()
                if number % 2 == 0:
                    average.update_parameters(raw)
        scheduler.step()
        average.eval()
        with s.section("eval"):
            print(f"epoch {epoch}: {evaluate():.4f}")

end(raw, average)
dist.destroy_process_group()
