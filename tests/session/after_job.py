"""A training with an evaluation and an export after its session; in its first life rank 1 fails in the evaluation.

Arguments: the way of the failure (``kill``, ``raise``, ``hang``), and the file of the export. ``raise`` fails in every
    life.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

import holdfast

STEPS = 5


def main(how: str, export: Path) -> None:
    """Train, evaluate, export."""
    dist.init_process_group("gloo")
    rank, life = dist.get_rank(), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with holdfast.session(model=model, optimizer=optimizer, checkpoint=export.with_name("ckpt")) as s:
        for step in s.steps(until=STEPS):
            with step:
                model(torch.randn(8, 8)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
            if step.committed:
                print(f"trained step {step.number} in life {life}", flush=True)
    dist.all_reduce(torch.ones(1))
    if rank == 1 and how == "raise":
        raise ValueError("no test data")
    if rank == 1 and life == 0:
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(1000)
    dist.all_reduce(torch.ones(1))
    if rank == 0:
        torch.save(model.state_dict(), export)
        print(f"exported in life {life}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
