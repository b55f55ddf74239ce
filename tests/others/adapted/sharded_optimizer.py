"""An optimizer that shards its own state: reduce-scatter of the gradient, update of the part, all-gather (Muon)."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import holdfast
import holdfast.torch
from tests.others.beat import beat, end, long

MAX_ITERS = long(12)
dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(1337)
model = nn.Sequential(nn.Linear(8, 16, bias=False), nn.Tanh(), nn.Linear(16, 4, bias=False))


class ShardedMomentum(torch.optim.Optimizer):
    """Momentum with its state sharded: each rank has the momentum of its rows."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                rows = p.shape[0] // world_size
                part = torch.empty_like(p[:rows])
                dist.reduce_scatter_tensor(part, p.grad / world_size)
                state = self.state[p]
                if not state:
                    state["momentum"] = torch.zeros_like(part)
                    holdfast.torch.declare(state["momentum"], p.shape, (rank * rows, 0))
                state["momentum"].mul_(0.9).add_(part)
                own = p[rank * rows : (rank + 1) * rows] - group["lr"] * state["momentum"].sign()
                dist.all_gather_into_tensor(p, own.contiguous())


optimizer = ShardedMomentum(model.parameters(), lr=1e-2)


def get_batch() -> tuple[torch.Tensor, torch.Tensor]:
    """Return samples that differ between ranks."""
    generator = torch.Generator().manual_seed(int(torch.randint(1 << 30, ())) + rank)
    x = torch.randn(6, 8, generator=generator)
    return x, x[:, :4].sin()


with holdfast.session(model=model, optimizer=optimizer, checkpoint="ckpt") as s:
    for step in s.steps(until=MAX_ITERS):
        with step:
            beat(step.number)
            x, y = get_batch()
            loss = (model(x) - y).square().mean()
            loss.backward()
            with step.update("momentum"):
                optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        if step.committed and rank == 0:
            print(f"iter {step.number}: loss {loss.item():.4f}")

end(model)
dist.destroy_process_group()
