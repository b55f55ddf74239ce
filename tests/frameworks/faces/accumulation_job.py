"""Gradient accumulation in the style of accelerate or of Fabric: ``python accumulation_job.py WAY [STEP]``.

Rank 1 is killed once, in the middle of STEP. ``accelerate-turns``: one batch in each turn of the loop.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import holdfast

BATCHES, STEPS = 4, 9


def pieces() -> tuple[nn.Module, torch.optim.Optimizer, DataLoader[Any]]:
    """Return a model, an optimizer and 10 batches for each of two ranks."""
    torch.manual_seed(0)
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(80, 8, generator=draw)
    net = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.1), nn.Linear(16, 1))
    data = TensorDataset(x, x.sum(1, keepdim=True))
    return net, torch.optim.AdamW(net.parameters(), 1e-2), DataLoader(data, 4, shuffle=True)


def struck(kill: int, step: int, at: int) -> None:
    """Kill rank 1 once, at the second batch."""
    if (step, at) == (kill, 1) and os.environ["RANK"] == "1" and not Path("struck").exists():
        Path("struck").touch()
        os.kill(os.getpid(), signal.SIGKILL)


def accelerated(way: str, kill: int) -> Any:
    """Train with ``with accelerator.accumulate(net)``, as in accelerate's documentation."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=BATCHES)
    net, optimizer, loader = accelerator.prepare(*pieces())
    turns = way == "accelerate-turns"
    with holdfast.session(model=net, optimizer=optimizer, checkpoint="ckpt") as s:
        for step in s.steps(loader, until=STEPS, batches=None if turns else BATCHES):
            with step as given:
                for at, (x, y) in enumerate([given] if turns else given):
                    struck(kill, step.number, at)
                    with accelerator.accumulate(net):
                        accelerator.backward(functional.mse_loss(net(x), y))
                        optimizer.step()
                        optimizer.zero_grad()
    return net


def fabricated(kill: int) -> nn.Module:
    """Train with ``fabric.no_backward_sync``, as in Fabric's documentation."""
    from lightning.fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=int(os.environ["WORLD_SIZE"]), strategy="ddp")
    fabric.launch()
    raw, plain, loader = pieces()
    net, optimizer = fabric.setup(raw, plain)
    data = fabric.setup_dataloaders(DataLoader(loader.dataset, 4, shuffle=True))
    with holdfast.session(model=net, optimizer=optimizer, checkpoint="ckpt") as s:
        for step in s.steps(data, until=STEPS, batches=BATCHES):
            with step as batches:
                for at, (x, y) in enumerate(batches):
                    struck(kill, step.number, at)
                    with fabric.no_backward_sync(net, enabled=at + 1 < len(batches)):
                        fabric.backward(functional.mse_loss(net(x), y) / BATCHES)
                optimizer.step()
                optimizer.zero_grad()
    return raw


def main(way: str, kill: int) -> None:
    """Train."""
    net = fabricated(kill) if way == "fabric" else accelerated(way, kill)
    total = xxhash.xxh3_128()
    for tensor in net.state_dict().values():
        total.update(tensor.detach().contiguous().numpy().tobytes())
    print(f"rank {os.environ['RANK']} ends with {total.hexdigest()}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else -1)
