"""Prints where processes listen in its network namespace, after a rank was replaced; see ``test_listening.py``."""

from __future__ import annotations

import os
import signal
import sys
from contextlib import suppress
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import holdfast
from holdfast.runtime.node.rundir import MODULES, RunDir

STEPS = 6
KILLED_AT = 3
LISTENS = "0A"


def listeners() -> list[str]:
    """Return address and owner of all listening TCP sockets.

    An address is in hexadecimal and the byte order of the machine. An owner is a process of the run, or ``rank`` for
    any other.
    """
    tables = [Path("/proc/self/net/tcp"), Path("/proc/self/net/tcp6")]
    lines = [
        line.split() for table in tables if table.exists() for line in table.read_text().splitlines()[1:]
    ]
    run = RunDir(Path(os.environ["HOLDFAST_RUN_DIR"]))
    owners = {
        inode: name
        for name in MODULES
        if (endpoint := run.read_endpoint(name)) is not None
        for inode in inodes(endpoint.pid)
    }
    return sorted(
        {
            f"{words[1].partition(':')[0]}={owners.get(words[9], 'rank')}"
            for words in lines
            if words[3] == LISTENS
        }
    )


def inodes(pid: int) -> set[str]:
    """Return the inodes of the sockets that a process has open."""
    found = set()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # it is closed by now
            found.add(os.readlink(link).removeprefix("socket:[").removesuffix("]"))
    return found


def note_bind(event: str, args: tuple[object, ...]) -> None:
    """Write down where this process binds a socket in Python: gloo does so in C++."""
    if event == "socket.bind":
        with Path("bound").open("a") as bound:
            bound.write(f"{args[1]}\n")


def main() -> None:
    """Train."""
    sys.addaudithook(note_bind)
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
