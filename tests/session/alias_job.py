"""A job whose steps use objects of the script through local names, and through items of containers.

Usage: ``alias_job.py FORM``. ``FORM``: ``local`` (a local name for an object with a count), ``items`` (parts of the
loss in a dict, each with a count), ``settings`` (the result of a function) or ``harmless`` (such names on which no
update depends, or whose values each step sets first). Faults and the result are those of ``tests/others/beat.py``.
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn

import holdfast
from tests.others.beat import beat, end

(FORM,) = sys.argv[1:]
STEPS = 12
FEATURES = 4


class Part:
    """A part of the loss whose weight falls at each third pass."""

    def __init__(self) -> None:
        self.passes = 0
        self.shown: float | None = None

    def __call__(self, output: Tensor) -> Tensor:
        """Return a tensor of no dimensions."""
        self.passes += 1
        part: Tensor = output.pow(2).mean() * 0.9 ** (self.passes // 3)
        return part

    def show(self, output: Tensor) -> None:
        """Record a value for a log."""
        self.passes += 1
        self.shown = output.mean().item() / self.passes


_SETTINGS = Part()


def settings() -> Part:
    """Return the settings of the script, as a library of settings does."""
    return _SETTINGS


class Trainer:
    """The objects of the script."""

    def __init__(self) -> None:
        self.part = Part()
        self.parts = {"square": Part(), "again": Part()}
        self.meters = [Part(), Part()]
        self.before: Tensor | None = None

    def loss(self, output: Tensor) -> Tensor:
        """Return a tensor of no dimensions."""
        if FORM == "local":
            part = self.part
            part.passes += 1
            return output.pow(2).mean() * 0.9 ** (part.passes // 3)
        if FORM == "items":
            return torch.stack([part(output) for part in self.parts.values()]).sum()
        if FORM == "settings":
            args = settings()
            args.passes += 1
            return output.pow(2).mean() * 0.9 ** (settings().passes // 3)
        return self._harmless(output)

    def _harmless(self, output: Tensor) -> Tensor:
        for meter in self.meters:
            meter.show(output)
        before, self.before = self.before, output.detach()
        if before is not None:
            print(f"moved by {(output - before).abs().mean().item():.3f}")
        fresh, part = Part(), self.part
        part.passes = 0
        return fresh(output) + part(output)


def main() -> None:
    """Train."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(1)
    model = nn.parallel.DistributedDataParallel(nn.Linear(FEATURES, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    trainer = Trainer()
    with holdfast.session(model=model, optimizer=optimizer, checkpoint="ckpt") as s:
        for step in s.steps(until=STEPS):
            with step:
                batch = torch.linspace(-1, 1, 2 * FEATURES).reshape(2, FEATURES) * (rank + 1 + step.number)
                optimizer.zero_grad()
                loss = trainer.loss(model(batch))
                beat(step.number)
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
    end(model)


main()
