"""A job whose model has modules of the script inside modules of torch: in a sequence, in a list, and in these in turn.

Usage: ``deep_job.py FORM``. ``FORM``: ``attributes`` (each module counts its passes, and lowers its temperature at some
of them), ``helpers`` (the same in an object), ``buffers`` (in buffers), ``harmless`` (attributes on which no result
depends, or which the next pass sets again), ``outermost`` (a model with such attributes), ``in_dict`` or ``in_list``
(the first form, and the script has the model in a dict of an object, or in a list). Faults and the result are
those of ``tests/others/beat.py``.
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


class Attributes(nn.Module):
    """A layer with a temperature that falls at each third pass."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(FEATURES, FEATURES)
        self.passes = 0
        self.temperature = 1.0

    def forward(self, batch: Tensor) -> Tensor:
        """Return a tensor of the shape of ``batch``."""
        self.passes += 1
        if self.passes % 3 == 0:
            self.temperature *= 0.8
        output: Tensor = self.layer(batch) / self.temperature
        return output


class Fall:
    """A temperature that falls at each third step."""

    def __init__(self) -> None:
        self.passes = 0
        self.temperature = 1.0

    def step(self) -> None:
        """Count a step."""
        self.passes += 1
        if self.passes % 3 == 0:
            self.temperature *= 0.8


class Helpers(nn.Module):
    """A layer with a temperature in an object."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(FEATURES, FEATURES)
        self.fall = Fall()

    def forward(self, batch: Tensor) -> Tensor:
        """Return a tensor of the shape of ``batch``."""
        self.fall.step()
        output: Tensor = self.layer(batch) / self.fall.temperature
        return output


class Buffers(nn.Module):
    """The same as ``Attributes`` with buffers."""

    passes: Tensor
    temperature: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(FEATURES, FEATURES)
        self.register_buffer("passes", torch.tensor(0))
        self.register_buffer("temperature", torch.tensor(1.0))

    def forward(self, batch: Tensor) -> Tensor:
        """Return a tensor of the shape of ``batch``."""
        self.passes += 1
        self.temperature *= torch.where(self.passes % 3 == 0, 0.8, 1.0)
        output: Tensor = self.layer(batch) / self.temperature.clone()
        return output


class Harmless(nn.Module):
    """A layer with attributes that carry nothing from pass to pass."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(FEATURES, FEATURES)
        self.passes = 0
        self.shape: torch.Size | None = None
        self.mask = torch.ones(1)
        self.length = 0
        self.shown: Tensor | None = None
        self.mean = 0.0
        self.sizes: list[float] = []

    def forward(self, batch: Tensor) -> Tensor:
        """Return a tensor of the shape of ``batch``."""
        self.passes += 1
        if self.passes % 100 == 0:
            print("a pass")
        self.length = len(batch)
        if self.shape != batch.shape:
            self.shape = batch.shape
            self.mask = torch.ones(batch.shape)
        if not self.training:
            self.mask = torch.zeros(1)
        output: Tensor = self.layer(batch * self.mask) / self.length
        self.shown = output.detach()
        self.mean = 0.9 * self.mean + 0.1 * output.mean().item()
        self.sizes = [*self.sizes[-3:], self.mean]
        return output


KIND = {
    "attributes": Attributes,
    "helpers": Helpers,
    "buffers": Buffers,
    "harmless": Harmless,
    "outermost": Harmless,
    "in_dict": Attributes,
    "in_list": Attributes,
}[FORM]


class Blocks(nn.Module):
    """Blocks in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(KIND() for _ in range(2))

    def forward(self, batch: Tensor) -> Tensor:
        """Return a tensor of the shape of ``batch``."""
        for block in self.blocks:
            batch = batch + block(batch)
        return batch


class Trainer:
    """The model of the job, in an attribute or in a container."""

    def __init__(self) -> None:
        model = nn.parallel.DistributedDataParallel(
            KIND() if FORM == "outermost" else nn.Sequential(nn.Sequential(KIND(), Blocks()), nn.Linear(4, 1))
        )
        self.nets: dict[str, nn.Module] = {"g": model} if FORM == "in_dict" else {}
        self.models: list[nn.Module] = [model] if FORM == "in_list" else []
        if not self.nets and not self.models:
            self.model = model

    def found(self) -> nn.Module:
        """Return the model."""
        if FORM == "in_dict":
            return self.nets["g"]
        return self.models[0] if FORM == "in_list" else self.model


def main() -> None:
    """Train."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(1)
    trainer = Trainer()
    optimizer = torch.optim.SGD(trainer.found().parameters(), 0.01)
    with holdfast.session(model=trainer.found(), optimizer=optimizer, checkpoint="ckpt") as s:
        for step in s.steps(until=STEPS):
            with step:
                batch = torch.linspace(-1, 1, (2 + step.number % 2) * FEATURES).reshape(-1, FEATURES) * (
                    rank + 1
                )
                optimizer.zero_grad()
                loss = trainer.found()(batch).pow(2).mean()
                beat(step.number)
                loss.backward()
                optimizer.step()
    end(trainer.found())


main()
