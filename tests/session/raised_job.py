"""Both ranks raise in a loop over the steps of an epoch, once; rank 1 then cleans up while rank 0 is gone already.

``python raised_job.py PLACE``. PLACE is ``block`` (in the block of step 5) or ``after`` (in the code after it). The job
prints the number of its steps.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

import holdfast

EPOCHS, EPOCH_STEPS, AT = 2, 4, 5


def main() -> None:
    """Train."""
    place = sys.argv[1]
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    mark = Path(f"struck-{rank}")
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def fail(step: int, where: str) -> None:
        if step == AT and where == place and not mark.exists():
            mark.touch()
            while len(list(Path().glob("struck-*"))) < dist.get_world_size():
                time.sleep(0.001)
            raise ValueError(f"once on rank {rank}")

    with holdfast.session(model=model, optimizer=optimizer, checkpoint="ckpt") as s:
        for epoch in s.epochs(EPOCHS):
            try:
                for step in s.steps(until=(epoch + 1) * EPOCH_STEPS):
                    with step:
                        loss = model(torch.ones(4, 8)).sum()
                        fail(step.number, "block")
                        loss.backward()
                        optimizer.step()
                        optimizer.zero_grad()
                    if step.committed:
                        fail(step.number, "after")
            finally:
                if rank == 1 and mark.exists():
                    time.sleep(1)
        print(f"rank {rank} ends at step {s.step}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
