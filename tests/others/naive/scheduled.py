"""A schedule of the script's own class, and the momentum of an average from a generator (I-JEPA's way).

The schedule is also one of a closure or another module.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import holdfast
from tests.others import rates
from tests.others.beat import beat, end, long

EPOCHS = long(3)
PLACE = os.environ["PLACE"]


class Warmup:
    """A learning rate that rises for some steps."""

    def __init__(self, optimizer: torch.optim.Optimizer, highest: float, steps: int) -> None:
        self.optimizer = optimizer
        self.highest = highest
        self.steps = steps
        self.count = 0.0

    def step(self) -> float:
        """Count a step, and set the rate."""
        self.count += 1
        rate = self.highest * min(1.0, self.count / self.steps)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        return rate


def warmup(optimizer: torch.optim.Optimizer, highest: float, steps: int) -> Callable[[], None]:
    """Return a function that sets a rate, which rises with its calls."""
    calls = 0.0

    def advance() -> None:
        nonlocal calls
        calls += 1
        for group in optimizer.param_groups:
            group["lr"] = highest * min(1.0, calls / steps)

    return advance


class Damped(torch.optim.SGD):
    """An optimizer whose steps become smaller with a count, which its ``state_dict()`` does not have."""

    count = 0

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        """Make one update."""
        self.count += 1
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.add_(parameter.grad.mul_(-group["lr"] / self.count))


dist.init_process_group("gloo")
torch.manual_seed(7)
inputs = torch.randn(40, 6, generator=torch.Generator().manual_seed(1))
data = TensorDataset(inputs, inputs.sum(1, keepdim=True))
sampler = DistributedSampler(data)  # type: ignore[var-annotated]
loader = DataLoader(data, batch_size=4, sampler=sampler)
raw = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 1))
teacher = copy.deepcopy(raw).requires_grad_(False).eval()
model = DistributedDataParallel(raw)
optimizer = (Damped if PLACE == "optimizer" else torch.optim.SGD)(raw.parameters(), lr=0.05, momentum=0.9)
criterion = nn.MSELoss()
schedule = Warmup(optimizer, 0.05, 12)
advances: dict[str, Callable[[], None]] = {
    "closure": warmup(optimizer, 0.05, 12),
    "module": partial(rates.advance, optimizer, 0.05),
}
advance = advances.get(PLACE)
momenta = (min(0.99, 0.8 + 0.01 * number) for number in range(1000))

with holdfast.session(model=model, optimizer=optimizer, checkpoint="ckpt", state={"teacher": teacher}) as s:
    for step in s.steps(loader, epochs=EPOCHS):
        with step as (x, y):
            beat(step.number)
            if PLACE == "block":
                schedule.step()
            out = model(x)
            loss = criterion(out, y) + criterion(out, teacher(x))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            momentum = next(momenta) if PLACE == "average" else 0.9
            with torch.no_grad():
                for new, kept in zip(raw.parameters(), teacher.parameters(), strict=True):
                    kept.mul_(momentum).add_((1 - momentum) * new)
        if step.committed and PLACE == "behind":
            schedule.step()
        if step.committed and advance is not None:
            advance()

end(raw, teacher)
dist.destroy_process_group()
