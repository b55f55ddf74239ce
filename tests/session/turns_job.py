"""Epochs and phases of the session, with work after each loop over steps: an evaluation, a file, the best result.

``python turns_job.py WAY [RANK:STEP:WHERE]``. WAY is one of these:

- ``plain``: each rank evaluates alone;
- ``shared``: all ranks add up their evaluations;
- ``sharded``: the same, with ``fully_shard`` and the memory tier;
- ``phased``: a phase, then epochs, then a phase without steps;
- ``left``: epochs end by ``break``;
- ``steps``: one loop, for comparison;
- ``range``, ``start``, ``while``, ``tail``: the ways in which scripts without ``epochs`` count epochs.

A rank is killed once, at WHERE of STEP: ``block``, ``after`` (before the file of its epoch), ``written`` (after it),
``prelude``, ``uncopied`` (all have ended the epoch, and the memory tier has not copied that). First it waits until the
other ranks have come to WHERE, because the answer to the fault depends on their places.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import xxhash
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import holdfast
from holdfast.session.loops.loop import Loops
from tests.session.once import await_ranks, come_to

EPOCHS, EPOCH_STEPS, RANKS = 4, 3, 2


class Job:
    """Model, data and the fault of one run."""

    def __init__(self, way: str, kill: str) -> None:
        dist.init_process_group("gloo")
        self.way, self._kill, self.rank = way, kill, dist.get_rank()
        torch.manual_seed(0)
        draw = torch.Generator().manual_seed(1)
        count = RANKS * EPOCH_STEPS * 4
        self.x, self.y = torch.randn(count, 8, generator=draw), torch.randint(0, 4, (count,), generator=draw)
        self.model: nn.Module = nn.Linear(8, 4)
        if way == "sharded":
            fully_shard(self.model)
        else:
            self.model = DistributedDataParallel(self.model)
        self.optimizer = torch.optim.Adam(self.model.parameters(), 1e-2)
        self.scheduler = StepLR(self.optimizer, 1, 0.7)
        data = TensorDataset(self.x, self.y)
        sampler: DistributedSampler[Any] = DistributedSampler(data)
        self.loader = DataLoader(data, 4, sampler=sampler)
        self.state: dict[str, Any] = {"best": -10.0, "history": []}

    def struck(self, step: int, where: str) -> None:
        """Kill this process with SIGKILL if this is its fault, once."""
        come_to(f"{where}-{step}", self.rank)
        if self._kill == f"{self.rank}:{step}:{where}" and not Path("struck").exists():
            await_ranks(f"{where}-{step}", range(RANKS))
            Path("struck").touch()
            os.kill(os.getpid(), signal.SIGKILL)

    def learn(self, steps: Iterator[holdfast.Step]) -> None:
        """Run a loop over steps."""
        for step in steps:
            with step as (x, y):
                loss: Any = functional.cross_entropy(self.model(x), y)
                loss.backward()
                self.struck(step.number, "block")
                self.optimizer.step()
                self.optimizer.zero_grad()
            if step.committed and self.way == "steps" and step.last_in_epoch:
                self.scheduler.step()

    def validate(self, s: Any, name: str) -> None:
        """Write a line and a file after a loop, and update the best result so far."""
        self.struck(s.step, "after")
        with torch.no_grad():
            found = self.found()
        if self.way in ("shared", "sharded"):
            dist.all_reduce(found)
        s.state["best"] = max(s.state["best"], -float(found))
        s.state["history"].append(round(float(found), 6))
        if self.rank == 0:
            with Path(f"{name}.txt").open("a") as file:
                file.write(f"{s.step} {self.bits()} {float(found):.6f} {torch.rand(()):.6f}\n")
            with Path("lines.txt").open("a") as file:
                file.write(f"{name}\n")
        self.struck(s.step, "written")
        self.scheduler.step()

    def found(self) -> torch.Tensor:
        """Return the loss of all data; with shards, the sum of the weights."""
        if isinstance(self.model, DistributedDataParallel):
            return functional.cross_entropy(self.model.module(self.x), self.y)
        return torch.stack([part.sum() for part in self.parts()]).sum()

    def parts(self) -> list[torch.Tensor]:
        """Return the weights that this rank holds."""
        held = self.model.state_dict().values()
        return [each.to_local() if isinstance(each, DTensor) else each for each in held]

    def bits(self) -> str:
        """Return a digest of the weights."""
        total = xxhash.xxh3_128()
        for tensor in self.parts():
            total.update(tensor.numpy().tobytes())
        return total.hexdigest()

    def epochs(self, s: Any, count: int = EPOCHS) -> None:
        """Train over epochs in the documented style."""
        for epoch in s.epochs(count):
            self.struck(s.step, "prelude")
            self.learn(s.steps(self.loader))
            self.validate(s, f"epoch{epoch}")
            if self.way == "left" and len(s.state["history"]) == 2:
                break


def main(way: str, kill: str) -> None:
    """Train."""
    job = Job(way, kill)
    renew = Loops.renew

    def struck_before(loops: Loops) -> None:
        job.struck(s.step, "uncopied")
        renew(loops)

    Loops.renew = struck_before  # type: ignore[assignment,method-assign]
    parts: dict[str, Any] = {"model": job.model, "optimizer": job.optimizer, "scheduler": job.scheduler}
    parts |= {"memory": 1} if way == "sharded" else {}
    with holdfast.session(**parts, state=job.state, checkpoint="ckpt", save_every_steps=4) as s:
        if way == "steps":
            job.learn(s.steps(job.loader, epochs=EPOCHS))
        elif way == "phased":
            for _ in s.phase("warmup"):
                job.learn(s.steps(job.loader, until=2))
                job.validate(s, "warmup")
            job.epochs(s, 2)
            for _ in s.phase("export"):
                job.validate(s, "export")
        elif way in ("range", "start"):
            for _ in range(s.step // EPOCH_STEPS if way == "start" else 0, EPOCHS):
                job.learn(s.steps(job.loader, epochs=1))
        elif way == "while":
            while s.step < EPOCHS * EPOCH_STEPS:
                job.learn(s.steps(job.loader, epochs=1))
        elif way == "tail":
            if s.step < EPOCH_STEPS:  # on a resume, this condition skips the rest of the training
                job.learn(s.steps(job.loader, epochs=EPOCHS))
        else:
            job.epochs(s)
        told = f"{job.bits()} {s.state['best']:.6f} {s.state['history']} {job.scheduler.last_epoch}"
        print(f"rank {job.rank} ends at {s.step}: {told}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else "")
