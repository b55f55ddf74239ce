"""A small DDP or HSDP training that waits at given steps until a file appears. It may ask for its rank at once.

``python spare_job.py --result DIR --steps 12 --gates 3,6 [--ask] [--refuse] [--workers 2] [--layout hsdp]`` writes a
digest per rank.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler

import holdfast
from holdfast.runtime.worker import state_transfer
from tests.session.job import BATCH, EPOCH_STEPS, SEED, Noisy, build, digest, gradients


def _refuse(
    self: state_transfer.StateServer, message: state_transfer.Talk
) -> tuple[state_transfer.Talk, Sequence[memoryview]]:
    return state_transfer.Refusal("damaged"), ()


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--layout", default="ddp")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--gates", default="")
    parser.add_argument("--result", type=Path, required=True)
    parser.add_argument("--ask", action="store_true")
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--refuse", action="store_true", help="give no newcomer a state")
    arguments = parser.parse_args()
    if arguments.refuse:
        state_transfer.StateServer._answer = _refuse  # type: ignore[method-assign]
    gates = {int(gate) for gate in arguments.gates.split(",") if gate}
    world = int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo")
    place: dict[str, Any] = {"rank": int(os.environ["RANK"])} if arguments.ask else {}
    net, wrapped = build(arguments.layout, world)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=arguments.steps)
    data = Noisy(EPOCH_STEPS * BATCH * world, None)
    sampler: DistributedSampler[Any] = DistributedSampler(data, seed=SEED, **place)
    loader = DataLoader(data, BATCH, sampler=sampler, num_workers=arguments.workers)
    with holdfast.session(model=wrapped, optimizer=optimizer, scheduler=scheduler, seed=SEED) as s:
        for step in s.steps(loader, until=arguments.steps):
            with step as batch:
                while step.number in gates and not (arguments.result / f"go-{step.number}").exists():
                    time.sleep(0.01)
                gradients(wrapped, wrapped, batch)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
    rank = dist.get_rank()
    text = digest(net, optimizer, float(scheduler.get_last_lr()[0]), buffers=rank == 0)
    where = {"rank": rank, "asked": place.get("rank", rank), "environment": int(os.environ["RANK"])}
    (arguments.result / f"rank-{rank}.json").write_text(
        json.dumps({"digest": text, "pid": os.getpid(), **where})
    )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
