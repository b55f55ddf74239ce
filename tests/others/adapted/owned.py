"""An optimizer that computes each update on one rank, which alone has its state, and sends it to all ranks (Muon)."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import holdfast
from tests.others.beat import beat, end, long

MAX_ITERS = long(12)
dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(1337)
model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))


class OwnedMomentum(torch.optim.Optimizer):
    """Momentum of each parameter on one rank, in turn; all ranks add up the updates, most of which are zero."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            updates = torch.zeros(sum(p.numel() for p in group["params"]))
            at = 0
            for number, p in enumerate(group["params"]):
                if number % world_size == rank:
                    state = self.state[p]
                    if not state:
                        state["momentum"] = torch.zeros_like(p)
                    state["momentum"].mul_(0.9).add_(p.grad)
                    updates[at : at + p.numel()] = state["momentum"].sign().flatten()
                at += p.numel()
            dist.all_reduce(updates)
            at = 0
            for p in group["params"]:
                p.add_(updates[at : at + p.numel()].view_as(p), alpha=-group["lr"])
                at += p.numel()


optimizer = OwnedMomentum(model.parameters(), lr=1e-2)


def get_batch() -> tuple[torch.Tensor, torch.Tensor]:
    """Return samples that differ between ranks."""
    generator = torch.Generator().manual_seed(int(torch.randint(1 << 30, ())) + rank)
    x = torch.randn(6, 8, generator=generator)
    return x, x[:, :4].sin()


def sum_gradients() -> None:
    """Sum each gradient over the ranks."""
    for p in model.parameters():
        dist.all_reduce(p.grad)


with holdfast.session(model=model, optimizer=optimizer, checkpoint="ckpt") as s:
    for step in s.steps(until=MAX_ITERS):
        with step:
            beat(step.number)
            x, y = get_batch()
            loss = (model(x) - y).square().mean()
            loss.backward()
            sum_gradients()
            with step.update("momentum"):
                optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        if step.committed and rank == 0:
            print(f"iter {step.number}: loss {loss.item():.4f}")

end(model)
dist.destroy_process_group()
