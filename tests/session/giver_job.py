"""A survivor that is stopped after it has settled, when its state is requested; see ``test_givers.py``."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import holdfast
from holdfast.core.protocol.messages import Settle
from holdfast.session.checkpoints.state_transfer import StateSource

STEPS = 12
KILLED_AT = 5
ASKED = Path("asked")
STOPPED = Path("stopped")


def stop_when_asked() -> None:
    """Stop this process once, when it has settled and is about to offer its state."""
    give = StateSource.give

    def trapped(self: StateSource, settle: Settle, frozen: bool) -> None:
        if ASKED.exists():
            ASKED.rename(STOPPED)
            os.kill(os.getpid(), signal.SIGSTOP)
        give(self, settle, frozen)

    StateSource.give = trapped  # type: ignore[method-assign]


def main() -> None:
    """Train."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    if rank == 0:
        stop_when_asked()
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = [torch.full((2, 4), float(number)) for number in range(STEPS)]
    with holdfast.session(model=model, optimizer=optimizer) as s:
        for step in s.steps(data, until=STEPS):
            with step as batch:
                if rank == 1 and step.number == KILLED_AT and not ASKED.exists() and not STOPPED.exists():
                    ASKED.touch()
                    os.kill(os.getpid(), signal.SIGKILL)
                model(batch).square().sum().backward()
                optimizer.step()
                optimizer.zero_grad()
    print(f"ends at {s.step}: {[p.tolist() for p in model.parameters()]}", flush=True)


if __name__ == "__main__":
    main()
