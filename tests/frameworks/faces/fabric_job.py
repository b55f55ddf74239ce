"""A loop with Lightning Fabric: ``python fabric_job.py WAY [RANK:STEP:PLACE ...]`` kills each of these ranks once.

``epochs``: epochs, a schedule, metrics and an evaluation. ``marked``: the loss comes from a method that is marked as a
forward method. ``left``: the same, without ``zero_grad``. ``weighted``: a sampler that Fabric deals to the ranks.
``scaler``: mixed precision with a scaler. ``scaler-forgotten``: the session does not have it. ``sharded``: FSDP2.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
import xxhash
from lightning.fabric import Fabric
from lightning.fabric.plugins import MixedPrecision
from lightning.fabric.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler

import holdfast

SAMPLES, BATCH, EPOCHS = 48, 4, 2
KILLS = [tuple(each.split(":")) for each in sys.argv[2:]]


class Net(nn.Module):
    """A small model with buffers and dropout. A second forward method returns the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.1), nn.Linear(16, 1))

    def forward(self, x: Tensor) -> Tensor:
        """Return the output."""
        output: Tensor = self.body(x)
        return output

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the mean square error."""
        return functional.mse_loss(self(x), y)


def struck(place: str, step: int) -> None:
    """Kill this rank once if that is asked for at this place."""
    if (os.environ["RANK"], str(step), place) in KILLS:
        mark = Path(f"struck-{step}-{place}")
        if not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)


def digest(net: nn.Module) -> str:
    """Return a digest of the weights and buffers."""
    total = xxhash.xxh3_128()
    for tensor in net.state_dict().values():
        whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
        total.update(whole.detach().contiguous().numpy().tobytes())
    return total.hexdigest()


def made(way: str) -> Fabric:
    """Return the Fabric of a way."""
    strategy: Any = "ddp"
    if way == "sharded":
        strategy = ModelParallelStrategy(lambda net, mesh: fully_shard(net, mesh=mesh["data_parallel"]), 2, 1)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=3)
    plugins = [MixedPrecision("16-mixed", "cpu", scaler)] if way.startswith("scaler") else []
    fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy, plugins=plugins)
    fabric.launch()
    fabric.seed_everything(3)
    return fabric


def main(way: str) -> None:
    """Train."""
    fabric = made(way)
    x = torch.randn(SAMPLES, 8)
    data = TensorDataset(x, x.sum(1, keepdim=True))
    sampler = None
    if way == "weighted":
        sampler = WeightedRandomSampler([1.0] * SAMPLES, SAMPLES, False, torch.Generator().manual_seed(5))
    loader = DataLoader(data, BATCH, shuffle=sampler is None, sampler=sampler)
    train, held_out = fabric.setup_dataloaders(loader, DataLoader(data, BATCH))
    raw = Net()
    net = fabric.setup(raw)
    net.mark_forward_method("loss")
    optimizer = fabric.setup_optimizers(torch.optim.AdamW(net.parameters(), 1e-2))
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.7)
    scaler = getattr(fabric.strategy.precision, "scaler", None) if way != "scaler-forgotten" else None

    with holdfast.session(
        model=net, optimizer=optimizer, scheduler=schedule, scaler=scaler, checkpoint="ckpt"
    ) as s:
        for epoch in s.epochs(EPOCHS):
            net.train()
            for step in s.steps(train):
                with step as (x, y):
                    struck("forward", step.number)
                    loss = functional.mse_loss(net(x), y) if way == "epochs" else net.loss(x, y)
                    loss.register_hook(lambda gradient, at=step.number: struck("backward", at))
                    fabric.backward(loss)
                    fabric.clip_gradients(net, optimizer, max_norm=1.0)
                    optimizer.step()
                    struck("update", step.number)
                    if way != "left":
                        optimizer.zero_grad()
                mean = fabric.all_reduce(loss.detach().clone(), reduce_op="mean")
                struck("log", step.number)
                if step.committed:
                    fabric.print(f"step {step.number} loss {mean:.6f}")
            schedule.step()
            with s.section("evaluation"), torch.no_grad():
                net(data[:BATCH][0])  # in training mode: it changes the buffers
                net.eval()
                error = torch.stack([functional.mse_loss(net(x), y) for x, y in held_out]).mean()
                struck("evaluation", epoch)
                fabric.print(f"epoch {epoch} error {fabric.all_gather(error).mean():.6f}")
    print(f"rank {fabric.global_rank} ends with {digest(net)}", flush=True)
    fresh = Net()
    if fabric.is_global_zero:
        holdfast.load("ckpt", fresh)
        print(f"rank 0 has saved {digest(fresh)}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
