"""A loop over epochs, with a loop over steps in each; the code after an epoch changes the learning rate.

``python epoch_job.py WAY [RANK:STEP[:changed]]``. WAY is ``stepping`` (a scheduler's step), ``plateau`` (decided by a
validation that all ranks add up), ``before`` (one loop over steps, and the schedule advances before a block) or
``apart`` (as ``before``, and the ranks do not meet there) or ``measuring`` (before a block, each rank passes data of
its own through the model, which changes its buffers). The rank is killed in the block of STEP, or when the learning
rate has changed before it.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import xxhash
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import holdfast
from tests.session.once import await_ranks, come_to

EPOCHS, EPOCH_STEPS, RANKS = 4, 3, 3


class Job:
    """Model, data and the fault of one run."""

    def __init__(self, kill: str, *, apart: bool) -> None:
        self._apart = apart
        dist.init_process_group("gloo")
        self.rank, self._kill = dist.get_rank(), kill
        torch.manual_seed(0)
        draw = torch.Generator().manual_seed(1)
        count = RANKS * EPOCH_STEPS * 4
        self.x, self.y = torch.randn(count, 8, generator=draw), torch.randint(0, 4, (count,), generator=draw)
        net = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))
        self.model: nn.Module = DistributedDataParallel(net)
        self.optimizer = torch.optim.Adam(self.model.parameters(), 1e-2)

    def struck(self, step: int, where: str = "") -> None:
        """Kill this process with SIGKILL if this is its fault, once."""
        if self._kill == f"{self.rank}:{step}{where}" and not Path("struck").exists():
            Path("struck").touch()
            os.kill(os.getpid(), signal.SIGKILL)

    def changed(self, step: int) -> None:
        """Meet all ranks after a change of the learning rate."""
        if self._apart and self._kill == f"{self.rank}:{step}:changed":
            await_ranks(f"block-{step}", set(range(RANKS)) - {self.rank})
        self.struck(step, ":changed")
        if not self._apart:
            dist.barrier()

    def learn(self, step: holdfast.Step) -> None:
        """Run the block of a step."""
        with step as (x, y):
            come_to(f"block-{step.number}", self.rank)
            self.loss(x, y).backward()
            self.struck(step.number)
            self.optimizer.step()
            self.optimizer.zero_grad()

    def loss(self, x: torch.Tensor, y: torch.Tensor) -> Any:
        """Return the loss of a batch."""
        return functional.cross_entropy(self.model(x), y)

    def measure(self) -> None:
        """Change the statistics of batch norm with data of this rank."""
        with torch.no_grad():
            self.model(self.x[self.rank :: RANKS])

    def validate(self) -> float:
        """Return the validation loss, summed over all ranks."""
        self.model.eval()
        with torch.no_grad():
            loss = self.loss(self.x[self.rank :: RANKS], self.y[self.rank :: RANKS])
        self.model.train()
        dist.all_reduce(loss)
        return float(loss)


def main(way: str, kill: str) -> None:
    """Train."""
    job, history, one_loop = (
        Job(kill, apart=way == "apart"),
        list[float](),
        way in ("before", "apart", "measuring"),
    )
    plateau = lr_scheduler.ReduceLROnPlateau(job.optimizer, factor=0.5, patience=0)
    halving = lr_scheduler.StepLR(job.optimizer, 1, 0.5)
    scheduler: Any = plateau if way == "plateau" else halving
    sampler: Any = DistributedSampler(TensorDataset(job.x, job.y))
    loader = DataLoader(TensorDataset(job.x, job.y), 4, sampler=sampler)
    arguments = {"model": job.model, "optimizer": job.optimizer, "scheduler": scheduler}
    with holdfast.session(**arguments, checkpoint="ckpt", state={"history": history}) as s:
        if one_loop:
            for step in s.steps(loader, epochs=EPOCHS):
                if step.number and step.number % EPOCH_STEPS == 0 and not step.again:
                    if way == "measuring":
                        job.measure()
                    else:
                        history.append(float(step.number))
                        scheduler.step()
                    job.changed(step.number)
                job.learn(step)
        for epoch in s.epochs(0 if one_loop else EPOCHS):
            for step in s.steps(loader):
                job.learn(step)
            history.append(job.validate() if way == "plateau" else float(epoch))
            scheduler.step(*history[-1:] if way == "plateau" else ())
            job.changed(s.step)
        total = xxhash.xxh3_128()
        for tensor in job.model.state_dict().values():
            total.update(tensor.numpy().tobytes())
        print(f"rank {job.rank} ends at {s.step}: {total.hexdigest()} {history}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else "")
