"""Each process asks ``holdfast.once`` for a value and writes it down; rank 1 is killed in its first life."""

from __future__ import annotations

import os
import signal
import sys
import uuid
from pathlib import Path

import torch
import torch.distributed as dist

import holdfast
from tests.session.once import first

DIES_AT, STEPS = 3, 8


def main() -> None:
    """Train."""
    place = Path(sys.argv[1])
    made = holdfast.once("identifier", lambda: {"id": uuid.uuid4().hex})
    again = holdfast.once("identifier", lambda: {"id": "another"})
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    with (place / f"asked-{rank}").open("a") as file:
        file.write(f"{os.getpid()} {made['id']} {again['id']}\n")
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with holdfast.session(model=model, optimizer=optimizer) as s:
        for step in s.steps(until=STEPS):
            with step:
                model(torch.ones(4, 8)).sum().backward()
                if rank == 1 and step.number == DIES_AT and first(place / "died"):
                    os.kill(os.getpid(), signal.SIGKILL)
                optimizer.step()
                optimizer.zero_grad()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
