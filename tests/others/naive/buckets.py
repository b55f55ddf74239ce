"""Hooks add gradients into a bucket, which is emptied after the update: the block raises when it runs again."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

import holdfast
from tests.others.beat import end

MAX_ITERS = 4
dist.init_process_group("gloo")
torch.manual_seed(7)
raw = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 1))
optimizer = torch.optim.AdamW(raw.parameters(), lr=0.05)
batches = torch.randn(MAX_ITERS, 8, 6, generator=torch.Generator().manual_seed(dist.get_rank()))
bucket: list[torch.Tensor] = []


def add(parameter: torch.Tensor) -> None:
    """Add a gradient to the bucket, and sum the full bucket over the ranks."""
    assert not any(parameter is each for each in bucket)
    bucket.append(parameter)
    if len(bucket) == len(list(raw.parameters())):
        for each in bucket:
            dist.all_reduce(each.grad)


for parameter in raw.parameters():
    parameter.register_post_accumulate_grad_hook(add)  # type: ignore[no-untyped-call]

with holdfast.session(model=raw, optimizer=optimizer, checkpoint="ckpt") as s:
    for step in s.steps(until=MAX_ITERS):
        with step:
            optimizer.zero_grad()
            raw(batches[step.number]).square().mean().backward()
            optimizer.step()
            bucket.clear()

end(raw)
dist.destroy_process_group()
