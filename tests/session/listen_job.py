"""Prints where processes listen in its network namespace, after a rank was replaced; see ``test_listening.py``."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import holdfast

STEPS = 6
KILLED_AT = 3
LISTENS = "0A"


def listeners() -> list[str]:
    """Return the addresses of all listening sockets, in hexadecimal and in the byte order of the machine."""
    tables = [Path("/proc/self/net/tcp"), Path("/proc/self/net/tcp6")]
    lines = [
        line.split() for table in tables if table.exists() for line in table.read_text().splitlines()[1:]
    ]
    return sorted({words[1].partition(":")[0] for words in lines if words[3] == LISTENS})


def main() -> None:
    """Train."""
    dist.init_process_group("gloo")
    killed = Path("killed")
    model = DistributedDataParallel(nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = [torch.full((2, 4), float(number)) for number in range(STEPS)]
    with holdfast.session(model=model, optimizer=optimizer) as s:
        for step in s.steps(data, until=STEPS):
            with step as batch:
                if dist.get_rank() == 1 and step.number == KILLED_AT and not killed.exists():
                    killed.touch()
                    os.kill(os.getpid(), signal.SIGKILL)
                model(batch).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            if dist.get_rank() == 0:
                with Path("listeners").open("a") as found:
                    found.write(" ".join(listeners()) + "\n")


if __name__ == "__main__":
    main()
