"""A pipeline by hand, whose stages give their parameters the same names."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import holdfast
from tests.others.beat import beat, end, long

EPOCHS = long(3)
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(7)
whole = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 4))
parts = [whole[number] for number in ((0, 1) if rank == 0 else (2,))]
stage = nn.Sequential(*parts)  # both stages have a "0.weight"
optimizer = torch.optim.AdamW(stage.parameters(), lr=0.05)
inputs = torch.randn(40, 6)
loader = DataLoader(TensorDataset(inputs, inputs[:, :4], torch.arange(40.0)), batch_size=8, shuffle=True)


def train(x: torch.Tensor, y: torch.Tensor, samples: torch.Tensor) -> None:
    """Update this rank's stage with one batch."""
    optimizer.zero_grad()
    hidden, other = torch.empty(8, 16), torch.empty(8)
    if rank == 0:
        hidden = stage(x)
        gradient = torch.empty_like(hidden)
        dist.send(samples, 1)
        dist.send(hidden.detach(), 1)
        dist.recv(gradient, 1)
        hidden.backward(gradient)
    else:
        dist.recv(other, 0)
        dist.recv(hidden, 0)
        assert torch.equal(other, samples), "the stages have read other samples"
        nn.functional.mse_loss(stage(hidden.requires_grad_()), y).backward()  # type: ignore[no-untyped-call]
        assert hidden.grad is not None
        dist.send(hidden.grad, 0)
    optimizer.step()


with holdfast.session(model=stage, optimizer=optimizer, checkpoint="ckpt", memory=1) as s:
    for step in s.steps(loader, epochs=EPOCHS):
        with step as (x, y, samples):
            beat(step.number)
            train(x, y, samples)

end(stage)
dist.destroy_process_group()
