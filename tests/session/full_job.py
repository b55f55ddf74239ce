"""The device of the only survivor is full when its copies are read for the comparison; see ``test_givers.py``."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import holdfast
from holdfast.frameworks.torch.state import boxes

STEPS = 8
KILLED_AT = 4
KILLED = Path("killed")
FULL = Path("full")


def fill_the_device() -> None:
    """Let one read in another thread fail, as on a GPU without room for it."""
    bytes_of = boxes.flat_bytes

    def read(tensor: torch.Tensor) -> torch.Tensor:
        if (
            threading.current_thread() is not threading.main_thread()
            and KILLED.exists()
            and not FULL.exists()
        ):
            FULL.touch()
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return bytes_of(tensor)

    boxes.flat_bytes = read


def main() -> None:
    """Train."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    if rank == 0:
        fill_the_device()
    torch.manual_seed(0)
    layer = nn.Linear(4, 4)
    layer.weight = nn.Parameter(torch.randn(4, 4).t())  # reading its bytes makes a copy, as on a device
    model = DistributedDataParallel(layer)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = [torch.full((2, 4), float(number)) for number in range(STEPS)]
    with holdfast.session(model=model, optimizer=optimizer) as s:
        for step in s.steps(data, until=STEPS):
            with step as batch:
                if rank == 1 and step.number == KILLED_AT and not KILLED.exists():
                    KILLED.touch()
                    os.kill(os.getpid(), signal.SIGKILL)
                model(batch).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
    print(f"ends at {s.step}: {[p.tolist() for p in model.parameters()]}", flush=True)


if __name__ == "__main__":
    main()
