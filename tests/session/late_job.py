"""The code of a script after a block, run after its rank has answered a fault; one file per rank.

``late_job.py --way WAY --result DIR``. Rank 1 is killed after the block of step 7, the last of an epoch. WAY is one of
these:

- ``calm``: no rank dies;
- ``late``: rank 0 gets the fence before it begins a section there;
- ``open``: the section is open;
- ``caught``: in the epoch before, an exception of the script left a section;
- ``break``, ``break-calm``: with shards; both ranks leave the loop after step 6; rank 0 gets the fence before that, and
   has an earlier state in memory;
- ``kept``: the same with a state of that very step;
- ``next``: rank 1 is killed in the step after that;
- ``pause``: with copies; the wait for rank 0 fails when it has left its loop;
- ``stop``: both leave the only loop there, and the session ends;
- ``exit``: the same by ``sys.exit()``.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import holdfast
from holdfast.core.protocol.messages import Fence
from holdfast.core.worker import decision_orders
from holdfast.session.steps.participant import StepParticipant
from tests.session.once import first

EPOCHS = 4
STRUCK_AT = 7
PAUSE_S = 1.0
SHARDED = ("break", "break-calm", "kept", "next")
FENCED, RESTING, STRUCK = Path("fenced"), Path("resting"), Path("struck")


def tell_of_fences() -> None:
    """Create a file when this rank has got a fence and answered it."""
    on_fence = StepParticipant.on_fence

    def told(self: StepParticipant, fence: Fence) -> None:
        on_fence(self, fence)
        FENCED.touch()

    StepParticipant.on_fence = told  # type: ignore[method-assign]


def await_file(marker: Path) -> None:
    """Wait until another thread or process has created the file."""
    while not marker.exists():
        time.sleep(0.01)


class Job:
    """Model, data and the fault of one run."""

    def __init__(self, way: str) -> None:
        dist.init_process_group("gloo")
        self.rank, self.way = dist.get_rank(), way
        self.memory = 1 if way in ("kept", "next") else 4
        if self.rank == 0:
            tell_of_fences()
        torch.manual_seed(0)
        draw = torch.Generator().manual_seed(1)
        data = TensorDataset(torch.randn(64, 8, generator=draw), torch.randint(0, 4, (64,), generator=draw))
        self.loader: Any = DataLoader(data, 8, sampler=DistributedSampler(data))  # 4 steps of 2 ranks
        net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
        self.model: Any = fully_shard(net) if way in SHARDED else DistributedDataParallel(net)
        self.optimizer = torch.optim.Adam(net.parameters(), 1e-2)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 1, 0.5)

    def compute(self, x: torch.Tensor, y: torch.Tensor) -> None:
        """Forward, backward and update."""
        loss: Any = functional.cross_entropy(self.model(x), y)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def struck(self) -> None:
        """Kill rank 1, once. Rank 0 continues when it knows of the fault."""
        if self.way.endswith("calm"):
            return
        if self.rank == 1 and first(STRUCK):
            if self.way == "open":
                await_file(RESTING)
            os.kill(os.getpid(), signal.SIGKILL)
        if self.rank == 0 and self.way not in ("open", "caught", "next"):
            await_file(FENCED)

    def over(self, s: Any, step: int) -> None:
        """Run the code at the end of an epoch."""
        if step == STRUCK_AT - 4 and self.way == "caught":
            with suppress(ValueError), s.section("rest"):
                raise ValueError("the script's own")
        if step == STRUCK_AT:
            self.struck()
            if self.rank == 0 and self.way in ("late", "open") and first(RESTING):
                with s.section("rest"):
                    time.sleep(PAUSE_S)
            time.sleep(PAUSE_S)
        self.schedule.step()

    def told(self) -> list[Any]:
        """Return the sums of the weights, and the position of the schedule."""
        whole = [getattr(p, "full_tensor", lambda p=p: p)() for p in self.model.parameters()]
        return [[w.double().sum().item() for w in whole], self.schedule.last_epoch]


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--way", required=True)
    parser.add_argument("--result", type=Path, required=True)
    given = parser.parse_args()
    job = Job(given.way)
    several = given.way in (*SHARDED, "pause")
    leaves = several or given.way in ("stop", "exit")
    loops = EPOCHS if several else 1
    if given.way == "pause":
        decision_orders.SCRIPT_TIMEOUT_S = PAUSE_S / 5
    with holdfast.session(
        model=job.model, optimizer=job.optimizer, scheduler=job.schedule, checkpoint="ckpt", memory=job.memory
    ) as s:
        for _ in s.epochs(loops):
            for step in s.steps(job.loader, epochs=EPOCHS // loops):
                with step as (x, y):
                    if given.way == "next" and step.number == STRUCK_AT:
                        job.struck()
                    job.compute(x, y)
                if step.committed and step.last_in_epoch and not leaves:
                    job.over(s, step.number)
                if leaves and step.committed and step.number == STRUCK_AT - 1:
                    if given.way != "next":
                        job.struck()
                    if given.way == "exit":
                        sys.exit()
                    break
            if leaves:
                if given.way == "pause" and job.rank == 0 and s.step == STRUCK_AT and first(RESTING):
                    time.sleep(PAUSE_S)
                job.schedule.step()
        told = job.told()
    given.result.mkdir(exist_ok=True)
    (given.result / f"rank-{job.rank}.json").write_text(json.dumps(told))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
