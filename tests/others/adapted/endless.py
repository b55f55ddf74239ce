"""A detector's loop: an endless loader, an update at some iterations only, a scaler that is switched off (YOLO)."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import holdfast
from tests.others.beat import beat, end, long

EPOCHS = long(3)
WARMUP = 8  # iterations


class Images(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Samples with a random augmentation, drawn in a loader worker."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.randn(6, generator=torch.Generator().manual_seed(index))
        return x * random.uniform(0.9, 1.1), x.sum().reshape(1)


class _RepeatSampler:
    def __init__(self, sampler: Any) -> None:
        self.sampler = sampler

    def __iter__(self) -> Iterator[Any]:
        while True:
            yield from iter(self.sampler)


class InfiniteDataLoader(DataLoader[Any]):
    """A loader with the same workers in all epochs."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        object.__setattr__(self, "batch_sampler", _RepeatSampler(self.batch_sampler))
        self.iterator = super().__iter__()

    def __len__(self) -> int:
        repeating: Any = self.batch_sampler
        return len(repeating.sampler)

    def __iter__(self) -> Any:
        for _ in range(len(self)):
            yield next(self.iterator)


class Detector(nn.Module):
    """Its layers are not registered in the order of their use, so DDP changes the layout of its buckets."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(16, 1)
        self.body = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU())

    def forward(self, x: torch.Tensor) -> Any:
        return self.head(self.body(x))


def seed_worker(worker: int) -> None:
    random.seed(torch.initial_seed() % 2**32)


dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(7)
data = Images()
sampler = DistributedSampler(data)  # type: ignore[var-annotated]
loader = InfiniteDataLoader(data, 4, sampler=sampler, num_workers=1, worker_init_fn=seed_worker)
raw = Detector()
model = DistributedDataParallel(raw, static_graph=True, bucket_cap_mb=0.0002)
optimizer = torch.optim.SGD(raw.parameters(), lr=0.05, momentum=0.9)
scaler = torch.amp.GradScaler("cpu", enabled=False)
average = AveragedModel(raw, multi_avg_fn=get_ema_multi_avg_fn(0.9))  # type: ignore[no-untyped-call]
criterion = nn.MSELoss()
last = {"update": -1}
accumulate = 3.0

sums = [torch.zeros_like(p) for p in raw.parameters()]
state = {"average": average, "last": last, "sums": sums}
with holdfast.session(model=model, optimizer=optimizer, scaler=scaler, checkpoint="ckpt", state=state) as s:
    for step in s.steps(loader, epochs=EPOCHS):
        with step as (x, y):
            number = step.number
            beat(number)
            if number <= WARMUP:
                accumulate = np.interp(number, [0, WARMUP], [1, 3]).round()
                optimizer.param_groups[0]["lr"] = np.interp(number, [0, WARMUP], [0.0, 0.05])
            optimizer.zero_grad()
            scaler.scale(criterion(model(x), y)).backward()
            grads = [p.grad for p in raw.parameters() if p.grad is not None]
            torch._foreach_add_(sums, grads)
            if number - last["update"] >= accumulate:
                torch._foreach_copy_(grads, sums)
                torch._foreach_zero_(sums)
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(raw.parameters(), 10.0)
                scaler.step(optimizer)
                scaler.update()
                average.update_parameters(raw)
                last["update"] = number

end(raw, average)
dist.destroy_process_group()
