"""The script ``lazy`` with its step counted in a variable, which a replacement begins again."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Sampler, TensorDataset

import holdfast
from tests.others.beat import beat, end, long

STEPS = long(9)
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(7)


class Endless(Sampler[int]):
    """Indices of this rank, in an order without an end."""

    def __iter__(self) -> Iterator[int]:
        """Yield the indices."""
        generator = torch.Generator().manual_seed(3)
        while True:
            yield from torch.randperm(40, generator=generator).tolist()[rank::2]


inputs = torch.randn(40, 6, generator=torch.Generator().manual_seed(1))
loader = DataLoader(TensorDataset(inputs), batch_size=4, sampler=Endless())
g = nn.Sequential(nn.Linear(3, 80), nn.ReLU(), nn.Linear(80, 80), nn.ReLU(), nn.Linear(80, 6))
d = nn.Sequential(nn.Linear(6, 80), nn.ReLU(), nn.Linear(80, 1))
average = copy.deepcopy(g).requires_grad_(False)
g.requires_grad_(False)
d.requires_grad_(False)
of_g = torch.optim.Adam(g.parameters(), lr=0.002)
of_d = torch.optim.Adam(d.parameters(), lr=0.002)
phases = [("g", g, of_g, 1), ("g reg", g, of_g, 4), ("d", d, of_d, 1), ("d reg", d, of_d, 3)]


def backward(name: str, module: nn.Module, real: torch.Tensor) -> None:
    """Compute the gradients of one phase, and average them over the ranks as one tensor."""
    module.requires_grad_(True)
    fake = g(torch.randn(4, 3))
    if name == "g reg":
        loss = fake.square().mean()
    elif name == "d reg":
        loss = d(real).square().mean()
    else:
        loss = -d(fake).mean() if name == "g" else d(fake).mean() - d(real).mean()
    loss.backward()
    module.requires_grad_(False)
    flat = torch.cat([p.grad.reshape(-1) for p in module.parameters()])  # type: ignore[union-attr]
    dist.all_reduce(flat)
    sizes = [p.numel() for p in module.parameters()]
    for p, part in zip(module.parameters(), torch.split(flat, sizes), strict=True):
        p.grad = part.view_as(p) / dist.get_world_size()


number = 0
with holdfast.session(
    model={"g": g, "d": d}, optimizer={"g": of_g, "d": of_d}, state={"average": average}, checkpoint="ckpt"
) as s:
    for step in s.steps(loader, until=STEPS):
        with step as (real,):
            beat(step.number)
            for name, module, optimizer, interval in phases:
                if number % interval != 0:
                    continue
                optimizer.zero_grad()
                backward(name, module, real)
                with step.update(name):
                    optimizer.step()
            for mean, weight in zip(average.parameters(), g.parameters(), strict=True):
                mean.copy_(weight.lerp(mean, 0.9))
        if step.committed:
            number += 1

end(g, d, average)
dist.destroy_process_group()
