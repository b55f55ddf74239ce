"""A training that advances a schedule and an average of weights after the block of a step, or after a loop.

``behind_job.py --layout ddp|fsdp --kill RANK:STEP:WHERE --result DIR`` writes one file per rank. WHERE is ``mid`` of a
block, ``behind`` (after) it, ``end`` (after the code that follows the block), or ``term``: SIGTERM before the block.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import time
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
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import holdfast
from holdfast.core.worker import decision_orders

EPOCHS = 4
SIGNALS = {"term": signal.SIGTERM}


class Job:
    """Model, data and the fault of one run."""

    def __init__(self, given: argparse.Namespace) -> None:
        dist.init_process_group("gloo")
        self.rank = dist.get_rank()
        self._kill, self._pause_s = given.kill, given.pause_s
        torch.manual_seed(0)
        draw = torch.Generator().manual_seed(1)
        data = TensorDataset(torch.randn(64, 8, generator=draw), torch.randint(0, 4, (64,), generator=draw))
        self.loader: Any = DataLoader(data, 8, sampler=DistributedSampler(data))  # 4 steps of 2 ranks
        net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
        self.average = AveragedModel(net)
        if given.layout == "fsdp":
            fully_shard(net)
        self.model: nn.Module = net if given.layout == "fsdp" else DistributedDataParallel(net)
        self.sharded = given.layout == "fsdp"
        self.optimizer = torch.optim.Adam(net.parameters(), 1e-2)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 1, 0.5)
        self.net = net

    def struck(self, step: int, where: str) -> None:
        """Send the signal if this is the place of the fault and it has not come yet."""
        if self._kill == f"{self.rank}:{step}:{where}" and not Path("struck").exists():
            Path("struck").touch()
            os.kill(os.getpid(), SIGNALS.get(where, signal.SIGKILL))
            time.sleep(0.1)

    def compute(self, step: int, x: torch.Tensor, y: torch.Tensor) -> None:
        """Forward, backward and update."""
        loss: Any = functional.cross_entropy(self.model(x), y)
        self.struck(step, "mid")
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def over(self, step: int) -> None:
        """Advance schedule and average at the end of an epoch."""
        self.struck(step, "behind")
        time.sleep(self._pause_s)
        self.schedule.step()
        if self.sharded:
            with torch.no_grad():
                for weight in self.net.parameters():
                    weight.mul_(0.9)
        else:
            self.average.update_parameters(self.net)
        self.struck(step, "end")

    def bits(self) -> str:
        """Return a digest of the weights and their average, and the position of the schedule."""
        total = xxhash.xxh3_128()
        for tensor in (*self.model.state_dict().values(), *self.average.state_dict().values()):
            total.update((tensor.to_local() if isinstance(tensor, DTensor) else tensor).numpy().tobytes())
        return f"{total.hexdigest()} {self.schedule.last_epoch}"


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--layout", default="ddp")
    parser.add_argument("--kill", default="")
    parser.add_argument("--pause-s", type=float, default=0.3)
    parser.add_argument("--patience-s", type=float, default=decision_orders.SCRIPT_TIMEOUT_S)
    parser.add_argument("--loops", action="store_true")
    parser.add_argument("--leave", type=int, default=-1)
    parser.add_argument("--resume", default="auto")
    parser.add_argument("--checkpoint", default="ckpt")
    parser.add_argument("--result", type=Path, required=True)
    given = parser.parse_args()
    decision_orders.SCRIPT_TIMEOUT_S = given.patience_s
    job = Job(given)
    state: dict[str, Any] = {} if job.sharded else {"average": job.average}
    with holdfast.session(
        model=job.model, optimizer=job.optimizer, scheduler=job.schedule, state=state,
        checkpoint=given.checkpoint, resume=given.resume, save=8, keep=100, memory=4,
    ) as s:  # fmt: skip
        for _ in s.epochs(EPOCHS if given.loops else 1):
            for step in s.steps(job.loader, epochs=1 if given.loops else EPOCHS):
                job.struck(step.number, "term")
                with step as (x, y):
                    job.compute(step.number, x, y)
                if step.committed and step.last_in_epoch and not given.loops:
                    job.over(step.number)
                if step.committed and step.number == given.leave:
                    break
            if given.loops:
                job.over(s.step)
    given.result.mkdir(exist_ok=True)
    (given.result / f"rank-{job.rank}.json").write_text(json.dumps(job.bits()))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
