"""A script that makes a process group after its first step; one file per rank.

``groups_job.py WAY MADE [KILLED:STEP]``. MADE is the step at which the group of the first two ranks is made. The rank
KILLED is killed once, in the block of STEP. WAY is one of these:

- ``after``: after the block, at its first use;
- ``between``: before the block; the block uses it;
- ``inside``: in the block; ``killed-there``: where rank 1 makes it, the rank is killed in place of KILLED;
- ``each``: in each block, another one;
- ``ended``: after the block, at every fourth step, and destroyed one step later;
- ``once``: after the first block from MADE on in each process, and destroyed at once;
- ``setup-ended``: before the session, and destroyed after the block of MADE.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import holdfast
from tests.session.once import first

MEMBERS = [0, 1]
STEPS = 12


def value_of(loss: torch.Tensor) -> torch.Tensor:
    """Return a copy of a loss, to be summed."""
    return loss.detach().double().clone()


class Job:
    """The group, and the sums over its ranks."""

    def __init__(self, way: str, made: int, killed: str) -> None:
        self.way, self.made, self.killed = way, made, killed
        self.rank, self.ready = dist.get_rank(), False
        self.group: dist.ProcessGroup | None = None
        if way == "setup-ended":
            self.make(-1)

    def beat(self, step: int, way: str = "") -> None:
        """Kill this process if it is the victim of ``step``."""
        if (
            f"{self.rank}:{step}" == self.killed
            and (self.way == "killed-there") == bool(way)
            and first(Path("killed"))
        ):
            os.kill(os.getpid(), signal.SIGKILL)

    def make(self, step: int) -> None:
        """Make the group."""
        self.beat(step, "killed-there")
        self.group = dist.new_group(MEMBERS)

    def end(self) -> None:
        """Destroy the group."""
        if self.group is not None and self.rank in MEMBERS:
            dist.destroy_process_group(self.group)
        self.group = None

    def use(self, step: int, value: torch.Tensor) -> None:
        """Write the sum of a value over the ranks of the group."""
        total = value_of(value)
        if self.rank in MEMBERS:
            dist.all_reduce(total, group=self.group)
        self.write(step, total)

    def write(self, step: int, total: torch.Tensor) -> None:
        """Write a sum to the file of this step."""
        Path(f"sum-{self.rank}-{step:02d}").write_text(repr(total.item()))

    def before(self, step: int) -> None:
        """Run the code before the block."""
        if self.way == "between" and self.group is None and step >= self.made:
            self.make(step)

    def inside(self, step: int, loss: torch.Tensor) -> None:
        """Run the code of the block before its update."""
        lazy = self.way in ("inside", "killed-there") and self.group is None and step >= self.made
        if lazy or self.way == "each":
            self.make(step)
        if self.way in ("between", "inside", "killed-there", "each") and step >= self.made:
            self.use(step, loss)

    def after(self, step: int, loss: torch.Tensor) -> None:
        """Run the code after a block that counts."""
        if self.way == "after" and step >= self.made:
            if self.group is None:
                self.make(step)
            self.use(step, loss)
        if self.way == "ended" and step % 4 == self.made + 1:
            self.end()
        if self.way == "ended" and step % 4 == self.made:
            self.make(step)
            self.use(step, loss)
        if self.way == "once" and step >= self.made:
            if not self.ready:
                self.make(step)
                self.end()
                self.ready = True
            total = value_of(loss)
            dist.all_reduce(total)
            self.write(step, total)
        if self.way == "setup-ended" and step == self.made:
            self.end()


def main(way: str, made: str, killed: str = "") -> None:
    """Train."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    draw = torch.Generator().manual_seed(1)
    inputs = torch.randn(8 * STEPS * dist.get_world_size(), 8, generator=draw)
    data = TensorDataset(inputs, inputs.sum(1, keepdim=True))
    loader = DataLoader(data, 8, sampler=DistributedSampler(data))
    net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1))
    model = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(net.parameters(), 0.01, momentum=0.9)
    job = Job(way, int(made), killed)
    with holdfast.session(model=model, optimizer=optimizer, checkpoint="ckpt") as s:
        for step in s.steps(loader, epochs=1):
            job.before(step.number)
            with step as (x, y):
                job.beat(step.number)
                optimizer.zero_grad()
                loss: Any = nn.functional.mse_loss(model(x), y)
                loss.backward()
                job.inside(step.number, loss)
                optimizer.step()
            if step.committed:
                job.after(step.number, loss)
    sums = {path.name: path.read_text() for path in sorted(Path.cwd().glob(f"sum-{job.rank}-*"))}
    weights = [p.double().sum().item() for p in net.parameters()]
    Path(f"ended-{job.rank}").write_text(json.dumps([sums, weights]))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
