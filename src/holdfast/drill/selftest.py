"""The self-test of recovery in place, for a torch that is newer than the tested versions.

``python -m holdfast.drill.selftest`` starts a job of two ranks in the working directory, with a model under DDP and one
under FSDP2 (replicated). Rank 1 is killed in a backward pass. The job must replace rank 1 while rank 0 keeps its
process, and no step may be lost. Both ranks must end with the bits of the same training without a fault. The exit code
is 0, or 1 with the reason as the last line of the output.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

import holdfast
from holdfast import event_log
from holdfast.frameworks.torch import private_api

RANKS, STEPS, KILLED_AT, BATCH = 2, 5, 2, 4
RUN = "selftest"
DIFFERENT = 4  # exit code of a rank
KILLED = Path("killed")


def _models() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    first = DistributedDataParallel(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8)))
    second = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
    fully_shard(second, mesh=init_device_mesh("cpu", (RANKS, 1), mesh_dim_names=("copies", "shards")))
    return first, second


def _learn(
    models: tuple[nn.Module, nn.Module],
    optimizer: torch.optim.Optimizer,
    x: torch.Tensor,
    *,
    struck: bool = False,
) -> None:
    between = models[0](x)
    if struck:
        between.register_hook(_strike)
    models[1](between).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def _strike(gradient: torch.Tensor) -> None:
    """Kill this process, once per job, when FSDP2 has finished its part of the backward pass and DDP has not."""
    if not KILLED.exists():
        KILLED.touch()
        os.kill(os.getpid(), signal.SIGKILL)


def _optimizer(models: tuple[nn.Module, nn.Module]) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for model in models for p in model.parameters()], 1e-2)


def _weights(models: tuple[nn.Module, nn.Module]) -> torch.Tensor:
    found = [p.detach() for model in models for p in model.parameters()]
    return torch.cat([(p.to_local() if isinstance(p, DTensor) else p).flatten() for p in found])


def job() -> int:
    """Train one rank plainly, then in a session with a kill, and compare the weights. Return the exit code."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    samples = torch.randn(STEPS * BATCH, 8, generator=torch.Generator().manual_seed(1))
    plain = _models()
    optimizer = _optimizer(plain)
    for first in range(0, STEPS * BATCH, BATCH):  # a replacement runs this alone; rank 0 compares
        _learn(plain, optimizer, samples[first : first + BATCH] * (rank + 1))
    models = _models()
    optimizer = _optimizer(models)
    named = {"ddp": models[0], "fsdp2": models[1]}
    with holdfast.session(model=named, optimizer=optimizer, checkpoint=None) as s:
        loader = torch.utils.data.DataLoader(TensorDataset(samples), BATCH)
        for step in s.steps(loader, until=STEPS):
            with step as (x,):
                _learn(models, optimizer, x * (rank + 1), struck=rank == 1 and step.number == KILLED_AT)
    ends = [torch.empty_like(_weights(models)) for _ in range(RANKS)]
    dist.all_gather(ends, _weights(models))
    same = torch.equal(ends[0], ends[1]) and (rank != 0 or torch.equal(ends[0], _weights(plain)))
    dist.destroy_process_group()
    return 0 if same else DIFFERENT


def main() -> int:
    """Start the job and check its outcome. Print the reason of a failure, and return the exit code."""
    if reason := _failure():
        _, failed = private_api.probed()
        print(f"{reason} ({failed[0][0]})" if failed else reason)
        return 1
    return 0


def _failure() -> str:
    command = [sys.executable, "-m", "holdfast", "run", "--nproc-per-node", str(RANKS), "--run-dir", "runs"]
    done = subprocess.run(
        [*command, "--run-id", RUN, "-m", "holdfast.drill.selftest", "rank"],
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
    )  # fmt: skip
    events = event_log.read(Path("runs", RUN, "events.jsonl")).events
    verdicts = [str(event.data["action"]) for event in events if event.kind == "verdict"]
    if done.returncode == DIFFERENT:
        return "after a fault the weights are not those of an undisturbed run"
    if done.returncode != 0:
        said = [line for line in done.stdout.splitlines() if line.strip()]
        return f"a job of two ranks ended with exit code {done.returncode}: {said[-1] if said else ''}"
    return "" if verdicts == ["replace"] else f"a lost rank is not replaced in place: {', '.join(verdicts)}"


if __name__ == "__main__":
    sys.exit(job() if sys.argv[1:] == ["rank"] else main())
