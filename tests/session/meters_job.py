"""Two ranks count in objects of their own and report after each epoch, as many public scripts do.

Usage: ``meters_job.py RESULTS FAULTS``, with faults ``RANK@PLACE@NUMBER,...``, once each. A rank kills itself at a
place (``block`` and ``next``: of a step, ``report``: of an epoch), or gets SIGTERM at the place ``stop`` of a step.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections import defaultdict, deque
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import holdfast
from tests.session.once import first

RESULTS, FAULTS = Path(sys.argv[1]), sys.argv[2].split(",")
EPOCHS = 3


class Meter:
    """The sum, the number and the last values of something."""

    def __init__(self) -> None:
        self.last: deque[float] = deque(maxlen=3)
        self.total = 0.0
        self.count = 0

    def update(self, value: float) -> None:
        """Add a value."""
        self.last.append(value)
        self.total += value
        self.count += 1

    def told(self) -> list[float]:
        """Return mean and last values. Without any value there is no mean."""
        return [self.total / self.count, *self.last]


class Meters:
    """Meters by name, made at their first use."""

    def __init__(self) -> None:
        self.meters: dict[str, Meter] = defaultdict(Meter)
        self.form = "{:.4f}"


def fault(place: str, number: int) -> None:
    """Inject the fault of this place, if there is one."""
    name = f"{dist.get_rank()}@{place}@{number}"
    if name in FAULTS and first(RESULTS.with_name(f"{RESULTS.name}.{name}")):
        os.kill(os.getpid(), signal.SIGTERM if place == "stop" else signal.SIGKILL)


dist.init_process_group("gloo")
torch.manual_seed(7)
inputs = torch.randn(32, 6, generator=torch.Generator().manual_seed(1))
data = TensorDataset(inputs, inputs.sum(1, keepdim=True))
loader = DataLoader(data, batch_size=4, sampler=DistributedSampler(data))
raw = nn.Sequential(nn.Linear(6, 16), nn.Dropout(0.1), nn.Linear(16, 1))
model = DistributedDataParallel(raw)
optimizer = torch.optim.SGD(raw.parameters(), lr=0.05)

with holdfast.session(model=model, optimizer=optimizer, checkpoint=f"{RESULTS}.ckpt") as s:
    seen = s.attach("seen", Meter())
    for epoch in s.epochs(EPOCHS):
        meters = s.attach("train", Meters())
        meters.meters["rate"] = Meter()
        for step in s.steps(loader):
            fault("next", step.number)
            with step as (x, y):
                seen.update(float(x[0, 0]))  # in the block: once for each step, although blocks run again
                fault("block", step.number)
                fault("stop", step.number)
                loss = nn.functional.mse_loss(model(x), y)
                optimizer.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
            if step.committed:
                meters.meters["loss"].update(loss.item())
                meters.meters["rate"].update(optimizer.param_groups[0]["lr"])
        fault("report", epoch)
        report = {**{name: meter.told() for name, meter in meters.meters.items()}, "seen": seen.told()}
        RESULTS.with_name(f"{RESULTS.name}-{dist.get_rank()}-{epoch}").write_text(json.dumps(report))

dist.destroy_process_group()
