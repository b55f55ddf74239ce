"""A small DDP training in one of many styles of scripts; one file per rank.

``python odd_job.py --what WHAT --kill RANK:STEP:WHERE,... --result DIR``. WHERE is a place that ``Job.struck`` names.
WHAT is a function of this module.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import random
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
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
from holdfast.frameworks.torch.comm.comm_state import fabric
from holdfast.runtime.worker.worker_client import WorkerClient
from tests.session.once import first

STEPS = 14
REST_S = 18.0  # longer than ``offer_s``: two waits for the survivor would end in its death

UPDATE_S = (
    6.0  # longer than ``quiesce_s``, and than the time between two reports of the agent on the job's pace
)


class Job:
    """Model, data and the faults of one run."""

    def __init__(self, kills: str, **ddp: Any) -> None:
        dist.init_process_group("gloo")
        self.rank = dist.get_rank()
        self._kills = kills.split(",")
        torch.manual_seed(0)
        samples = torch.Generator().manual_seed(1)
        x, y = torch.randn(200, 16, generator=samples), torch.randint(0, 4, (200,), generator=samples)
        data = TensorDataset(x, y)
        self.loader: Any = DataLoader(data, 4, sampler=DistributedSampler(data))
        net = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 4))
        self.model: nn.Module = DistributedDataParallel(net, bucket_cap_mb=0.002, **ddp)
        self.optimizer: torch.optim.Optimizer = torch.optim.Adam(self.model.parameters(), 1e-2)
        self.blocks: list[int] = []

    def session(self, state: dict[str, Any] | None = None, verify_block: int = 1000) -> Any:
        """Return a session of this job."""
        return holdfast.session(
            model=self.model, optimizer=self.optimizer, checkpoint="ckpt", save=1000, memory=0, state=state,
            verify_block=verify_block,
        )  # fmt: skip

    def struck(self, step: int, where: str) -> None:
        """Kill this process with SIGKILL if this is its fault, once."""
        kill = f"{self.rank}:{step}:{where}"
        mark = Path(f"struck-{kill}")
        if kill in self._kills and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    def cut(self, step: int) -> None:
        """Cut the connections of this process to the other ranks if this is its fault, once."""
        kill = f"{self.rank}:{step}:cut"
        mark = Path(f"struck-{kill}")
        if kill in self._kills and not mark.exists():
            mark.touch()
            for inner in fabric()._inners():
                inner.sever()

    def struck_together(self, step: int, where: str) -> None:
        """Kill this process when all ranks are here, once. The others wait until they know of it, and a moment more."""
        kill = next((kill for kill in self._kills if kill.endswith(f":{step}:{where}")), "")
        if not kill or Path(f"struck-{kill}").exists():
            return
        here = [Path(f"here-{rank}-{step}-{where}") for rank in range(dist.get_world_size())]
        here[self.rank].touch()
        if kill.startswith(f"{self.rank}:"):
            while not all(path.exists() for path in here):
                time.sleep(0.01)
            self.struck(step, where)
        client = WorkerClient.current()
        while client is not None and not client.fenced:
            time.sleep(0.01)
        time.sleep(1.0)

    def compute(self, step: int, x: torch.Tensor, y: torch.Tensor) -> None:
        """Run forward and backward."""
        self.struck(step, "start")
        loss: Any = functional.cross_entropy(self.model(x), y)
        self.struck(step, "mid")
        loss.backward()
        self.struck(step, "end")

    def update(self) -> None:
        """Run the optimizer's update."""
        self.optimizer.step()
        self.optimizer.zero_grad()


def plain(job: Job) -> dict[str, Any]:
    """Train as the documentation shows."""
    return skipping(job, ())


def skipping(job: Job, skipped: tuple[int, ...] = (2, 3)) -> dict[str, Any]:
    """Skip the batch in some blocks."""
    with job.session() as s:
        for step in s.steps(job.loader, until=STEPS):
            with step as (x, y):
                job.blocks.append(step.number)
                job.struck(step.number, "begin")
                if step.number % 5 in skipped:
                    continue
                job.compute(step.number, x, y)
                job.update()
            job.struck(step.number, "after")
    return {}


def late(job: Job) -> dict[str, Any]:
    """Skip the batch in the first blocks."""
    return skipping(job, (0, 1, 2))


def between(job: Job) -> dict[str, Any]:
    """Draw random numbers before each block."""
    own = torch.Generator()
    drawn: dict[int, list[float]] = {}
    with job.session({"own": own}) as s:
        for step in s.steps(job.loader, until=STEPS):
            noise = torch.rand(1) + random.random() + np.random.random() + torch.rand(1, generator=own)
            drawn[step.number] = noise.tolist()
            with step as (x, y):
                job.compute(step.number, x + noise, y)
                job.update()
            job.struck(step.number, "after")
    return {"drawn": drawn.get(STEPS - 1)}


def accumulating(job: Job) -> dict[str, Any]:
    """Keep gradients from block to block."""
    with job.session() as s:
        for step in s.steps(job.loader, until=STEPS):
            with step as (x, y):
                job.compute(step.number, x, y)
                if step.number % 4 == 3:
                    job.update()
    return {}


def keeping(job: Job) -> dict[str, Any]:
    """Never clear gradients."""
    with job.session() as s:
        for step in s.steps(job.loader, until=STEPS):
            with step as (x, y):
                job.compute(step.number, x, y)
                job.optimizer.step()
    return {}


def inside(job: Job) -> dict[str, Any]:
    """Accumulate gradients in one block; drop some of them and clear them late or early. All blocks are checked."""
    with job.session(verify_block=1) as s:
        for step in s.steps(job.loader, until=STEPS):
            with step as (x, y):
                job.optimizer.zero_grad(set_to_none=step.number % 2 == 0)
                for micro in range(2):
                    job.compute(step.number, x[micro::2], y[micro::2])
                if step.number % 5:
                    job.optimizer.step()
            job.struck(step.number, "after")
    return {}


def caught(job: Job) -> dict[str, Any]:
    """Catch an exception around a block."""
    with job.session() as s:
        for step in s.steps(job.loader, until=STEPS):
            try:
                with step as (x, y):
                    job.compute(step.number, x, y)
                    if step.number == 2:
                        raise ValueError("bad batch")
                    job.update()
            except ValueError:
                pass
    return {}


def leaving(job: Job) -> dict[str, Any]:
    """End the script in the middle of the loop, as an early stop may do."""
    with job.session() as s:
        for step in s.steps(job.loader, until=STEPS):
            if step.number == 5:
                sys.exit()
            with step as (x, y):
                job.compute(step.number, x, y)
                job.update()
    return {}


def stopping(job: Job) -> dict[str, Any]:
    """Stop early by a flag in the state, which is read before each block."""
    stop = {"now": False}
    with job.session({"stop": stop}) as s:
        for step in s.steps(job.loader, until=STEPS):
            if stop["now"]:
                break
            with step as (x, y):
                job.compute(step.number, x, y)
                job.update()
            stop["now"] = step.number == 9
        job.struck(9, "left")
    return {}


def searching(job: Job) -> dict[str, Any]:
    """Train with an optimizer that evaluates its closure several times."""
    job.optimizer = torch.optim.LBFGS(job.model.parameters())
    return plain(job)


class Meter:
    """A meter that counts in plain values and in a tensor."""

    def __init__(self) -> None:
        self.calls = 0
        self.total = torch.zeros(2)

    def state_dict(self) -> dict[str, Any]:
        """Return the live attributes, not a copy."""
        return vars(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take ``state``."""
        vars(self).update(state)


def measuring(job: Job) -> dict[str, Any]:
    """Count the inputs of the block in an object."""
    meter = Meter()
    with job.session({"meter": meter}) as s:
        for step in s.steps(job.loader, until=STEPS):
            with step as (x, y):
                meter.calls += 1
                meter.total += x.mean()
                job.compute(step.number, x, y)
                job.update()
    return {"drawn": [meter.calls]}


class Momentum(nn.Module):
    """A model with a slow copy of a net, which changes in forward."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net, self.slow = net, copy.deepcopy(net).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> Any:
        """Return the sum of both outputs."""
        for mine, slow in zip(self.net.parameters(), self.slow.parameters(), strict=True):
            slow.data.mul_(0.9).add_(mine.data, alpha=0.1)
        return self.net(x) + self.slow(x)


def averaging(job: Job) -> dict[str, Any]:
    """Change averages of weights before the vote: in forward, and after a tentative update."""
    net = copy.deepcopy(next(job.model.children()))
    job.model = DistributedDataParallel(Momentum(net))
    job.optimizer = torch.optim.Adam(net.parameters(), 1e-2)
    average = AveragedModel(net)
    with job.session({"average": average}) as s:
        for step in s.steps(job.loader, until=STEPS):
            with step as (x, y):
                job.compute(step.number, x, y)
                with step.update("net"):
                    job.update()
                average.update_parameters(net)
                job.struck(step.number, "late")
    return {"drawn": [tensor.sum().item() for tensor in average.state_dict().values()]}


def alternating(job: Job) -> dict[str, Any]:
    """Change an average at every second step of a count that is in no state, and so starts again in a replacement."""
    net = next(job.model.children())
    average, count = AveragedModel(net), 0
    with job.session({"average": average}) as s:
        for step in s.steps(job.loader, until=STEPS):
            with step as (x, y):
                job.compute(step.number, x, y)
                job.update()
                if count % 2:
                    average.update_parameters(net)
            if step.committed:
                count += 1
    return {"drawn": []}


def owning(job: Job) -> dict[str, Any]:
    """Keep one random walk per rank, which blocks continue, and another one wrongly in the place of the job's state."""
    next(job.model.children()).register_buffer("mine", torch.full((2,), float(job.rank)))
    job.model = DistributedDataParallel(next(job.model.children()), broadcast_buffers=False)
    walk, wrong = np.random.default_rng(job.rank), [float(job.rank)]
    sums: list[float] = [0.0]
    with job.session({"wrong": wrong, "right": [1.0]}) as s:
        if s.own is None:
            s.own = {"walk": walk.bit_generator.state, "sums": sums}
        for step in s.steps(job.loader, until=STEPS):
            with step as (x, y):
                walk.bit_generator.state, sums = s.own["walk"], list(s.own["sums"])
                sums.append(sums[-1] + float(walk.normal()))
                s.own = {"walk": walk.bit_generator.state, "sums": sums}
                job.struck(step.number, "begin")
                job.compute(step.number, x + sums[-1], y)
                job.update()
            job.struck(step.number, "after")
    return {"drawn": sums}


class Stream:
    """An endless loader of one rank, which knows its position."""

    def __init__(self, rank: int) -> None:
        self.draw = np.random.default_rng(rank)

    def __iter__(self) -> Any:
        while True:
            x = torch.from_numpy(self.draw.normal(size=(4, 16)).astype(np.float32))
            yield x, torch.from_numpy(self.draw.integers(0, 4, 4))

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the loader."""
        return {"draw": self.draw.bit_generator.state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Set the position of the loader."""
        self.draw.bit_generator.state = state["draw"]


def streaming(job: Job) -> dict[str, Any]:
    """Train with a loader that has its own state on each rank. A fault may come in the update."""
    job.loader = Stream(job.rank)
    job.optimizer.register_step_post_hook(lambda *_: job.struck(s.step, "update"))
    with job.session() as s:
        for step in s.steps(job.loader, until=STEPS):
            with step as (x, y):
                job.compute(step.number, x, y)
                job.update()
            job.struck(step.number, "after")
    return {}


def evaluating(job: Job) -> dict[str, Any]:
    """Sum a value over all ranks before every fourth block."""
    scores: list[float] = []
    with job.session({"scores": scores}) as s:
        evaluate(job, s, scores)
    return {"drawn": scores}


def resting(job: Job) -> dict[str, Any]:
    """Let rank 0 work alone for long before a block, once."""
    with job.session() as s:
        for step in s.steps(job.loader, until=STEPS):
            if step.number == 7 and job.rank == 0 and first(Path("rested")):
                with s.section("rest"):
                    time.sleep(REST_S)
            with step as (x, y):
                job.compute(step.number, x, y)
                job.update()
    return {}


def updating(job: Job) -> dict[str, Any]:
    """Make two updates in a row long. Rank 1 may die in one while the others are far from its end."""
    lasts_s = {7: (UPDATE_S,) * 3, 8: (2 * UPDATE_S, UPDATE_S, 2 * UPDATE_S)}

    def linger(*_: object) -> None:
        time.sleep(lasts_s.get(s.step, (0.0,) * 3)[job.rank])
        job.struck(s.step, "update")

    job.optimizer.register_step_post_hook(linger)
    with job.session() as s:
        for step in s.steps(job.loader, until=STEPS):
            with step as (x, y):
                job.compute(step.number, x, y)
                job.update()
    return {}


def evaluating_shards(job: Job) -> dict[str, Any]:
    """Evaluate as :func:`evaluating`, with shards that one rank holds alone. The memory tier keeps every third step."""
    net = nn.Sequential(nn.Linear(16, 63), nn.ReLU(), nn.Dropout(0.2), nn.Linear(63, 6))
    fully_shard(net)
    job.model = net
    job.optimizer = torch.optim.Adam(net.parameters(), 1e-2)
    scores: list[float] = []
    with holdfast.session(model=net, optimizer=job.optimizer, memory=3, state={"scores": scores}) as s:
        evaluate(job, s, scores)
    return {"drawn": scores}


def adjusting(job: Job) -> dict[str, Any]:
    """Set the learning rate from the number of the step, before the block."""
    with job.session() as s:
        for step in s.steps(job.loader, until=STEPS):
            for group in job.optimizer.param_groups:
                group["lr"] = 0.01 / (1 + step.number)
            job.struck(step.number, "before")
            with step as (x, y):
                job.compute(step.number, x, y)
                job.update()
            job.struck(step.number, "after")
    return {}


def moving(job: Job) -> dict[str, Any]:
    """Move a schedule before some blocks, also before a block that runs again."""
    schedule = torch.optim.lr_scheduler.ExponentialLR(job.optimizer, 0.5)
    with holdfast.session(
        model=job.model, optimizer=job.optimizer, scheduler=schedule, checkpoint="ckpt"
    ) as s:
        for step in s.steps(job.loader, until=STEPS):
            if step.number % 4 == 3:
                schedule.step()
            with step as (x, y):
                job.cut(step.number)
                job.compute(step.number, x, y)
                job.update()
    return {}


def passing(job: Job) -> dict[str, Any]:
    """Make a pass in training mode before some blocks, also before a block that runs again."""
    raw = nn.Sequential(nn.Linear(16, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 4))
    job.model = DistributedDataParallel(raw)
    job.optimizer = torch.optim.Adam(raw.parameters(), 1e-2)
    with job.session() as s:
        for step in s.steps(job.loader, until=STEPS):
            if step.number % 4 == 3:
                with torch.no_grad():
                    raw(torch.ones(8, 16))
            with step as (x, y):
                job.cut(step.number)
                job.compute(step.number, x, y)
                job.update()
    return {}


def evaluate(job: Job, session: Any, scores: list[float]) -> None:
    """Train, with an evaluation as the manual shows."""
    for step in session.steps(job.loader, until=STEPS):
        if step.number % 4 == 0 and not step.again:
            with session.section("eval"):
                score = torch.tensor([float(step.number + job.rank)])
                dist.all_reduce(score)
                job.struck(step.number, "evaluation")
                scores.append(score.item())
        with step as (x, y):
            job.compute(step.number, x, y)
            job.update()
        job.struck(step.number, "after")


@contextmanager
def taking_place(average: list[torch.Tensor], net: nn.Module) -> Iterator[None]:
    """Put averages in the place of the weights, past torch's version counter."""
    kept = [parameter.data.clone() for parameter in net.parameters()]
    for parameter, mean in zip(net.parameters(), average, strict=True):
        parameter.data.copy_(mean)
    try:
        yield
    finally:
        for parameter, weights in zip(net.parameters(), kept, strict=True):
            parameter.data.copy_(weights)


def swapping(job: Job) -> dict[str, Any]:
    """Evaluate averages in the place of the weights, before blocks and after each of two loops."""
    net = next(job.model.children())
    average = [parameter.detach().clone() for parameter in net.parameters()]
    with job.session({"average": average}) as s:
        for until in (8, STEPS):
            for _ in s.phase(f"until {until}"):
                for step in s.steps(job.loader, until=until):
                    if step.number % 4 == 1 and not step.again:
                        with s.section("eval"), taking_place(average, net):
                            job.struck_together(step.number, "evaluation")
                    with step as (x, y):
                        job.compute(step.number, x, y)
                        job.update()
                        for mean, parameter in zip(average, net.parameters(), strict=True):
                            mean.lerp_(parameter.detach(), 0.3)
                with s.section("eval"), taking_place(average, net):
                    job.struck_together(s.step, "validation")
    return {"drawn": [mean.sum().item() for mean in average]}


def casting(job: Job) -> dict[str, Any]:
    """Compute in a type that depends on the process: a newcomer uses another type of the same size."""
    kind = torch.float16 if any(Path().glob("struck-*")) else torch.bfloat16
    job.model = DistributedDataParallel(next(job.model.children()).to(kind))
    job.optimizer = torch.optim.Adam(job.model.parameters(), 1e-2)
    with job.session() as s:
        for step in s.steps(job.loader, until=STEPS):
            with step as (x, y):
                job.compute(step.number, x.to(kind), y)
                job.update()
    return {}


def named(rows: list[tuple[torch.Tensor, torch.Tensor]]) -> dict[str, Any]:
    """Return a batch as other libraries make them: by name, with an array beside the tensors."""
    x, y = (torch.stack(column) for column in zip(*rows, strict=True))
    return {"x": x, "labels": y, "scale": np.full((16,), 2.0, dtype=np.float32)}


def changing(job: Job) -> dict[str, Any]:
    """Take the batch apart in the block, and write into the batch and into the script's objects; UNTIL ends the loop.

    The block's result is used after it, whether the step counts or not.
    """
    job.loader = DataLoader(job.loader.dataset, 4, sampler=job.loader.sampler, collate_fn=named)
    printed: list[str] = []

    def train(step: int, batch: dict[str, Any]) -> torch.Tensor:
        y, scale = batch.pop("labels"), batch["scale"]
        x: torch.Tensor = batch["x"].mul_(torch.from_numpy(scale)).add_(1)
        scale += 1
        if step % 5 == 2:
            y.add_(1).remainder_(4)
        job.compute(step, x, y)
        job.update()
        return x.sum()

    with job.session() as s:
        for step in s.steps(job.loader, until=int(os.environ.get("UNTIL", STEPS))):
            with step as batch:
                if s.own is None:
                    s.own = {"seen": 0}
                s.own["seen"] += 1
                total = train(step.number, batch)
            printed.append(f"{total:.3f}")
            job.struck(step.number, "after")
        seen = s.own
    return {"drawn": [seen, printed[-1]]}


def viewing(job: Job) -> dict[str, Any]:
    """Keep gradients in DDP's buckets, and zero them there."""
    job.model = DistributedDataParallel(next(job.model.children()), gradient_as_bucket_view=True)
    with job.session() as s:
        for step in s.steps(job.loader, until=3):
            with step as (x, y):
                job.compute(step.number, x, y)
                job.optimizer.step()
                job.optimizer.zero_grad(set_to_none=False)
    return {}


WAYS = {
    way.__name__: way
    for way in (
        plain, skipping, late, between, accumulating, inside, caught, searching, measuring, viewing, evaluating,
        adjusting, moving, passing,
        evaluating_shards, resting, updating, streaming, averaging, alternating, owning, leaving,
        stopping, casting, swapping, changing, keeping,
    )
}  # fmt: skip


def main() -> None:
    """Train, and write the results."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--what", default="plain")
    parser.add_argument("--kill", default="")
    parser.add_argument("--result", type=Path, required=True)
    given = parser.parse_args()
    job = Job(given.kill)
    found = WAYS[given.what](job)
    total = xxhash.xxh3_128()
    for parameter in job.model.parameters():
        part: Any = parameter.detach()
        total.update((part.to_local() if isinstance(part, DTensor) else part).numpy().tobytes())
    given.result.mkdir(exist_ok=True)
    told = {"digest": total.hexdigest(), "blocks": job.blocks, **found}
    (given.result / f"rank-{job.rank}.json").write_text(json.dumps(told))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
