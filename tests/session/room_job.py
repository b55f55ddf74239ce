"""A small DDP training in which rank 1 has no room for a copy of its share when the last step is saved.

The limit on the size of files also counts for memory with a descriptor. It is lifted when the loop is over, except with
``stays``.
"""

from __future__ import annotations

import resource
import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import holdfast

STEPS = 3
WIDTH = 1000  # a share of 2 MB
ROOM_SIZE_BYTES = 1_000_000


def main() -> None:
    """Train, with a periodic save at the last step only."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(WIDTH, WIDTH))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    with holdfast.session(model=model, optimizer=optimizer, checkpoint="ckpt", save=STEPS, memory=0) as s:
        for step in s.steps(range(STEPS)):
            with step:
                optimizer.zero_grad()
                model(torch.ones(2, WIDTH)).sum().backward()
                optimizer.step()
            if step.number == STEPS - 1 and dist.get_rank() == 1:
                resource.setrlimit(resource.RLIMIT_FSIZE, (ROOM_SIZE_BYTES, before[1]))
        if "stays" not in sys.argv:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)


if __name__ == "__main__":
    main()
