"""A job that opens its session without ``with``, as the constructor of a trainer class does.

Usage: ``opened_job.py END``. ``END``: empty; or an end of rank 1 after 6 steps, in the first process only: ``kill``,
``raise`` or ``exit``; or ``close``, which leaves the session at the end; or ``fork``, which does so after a child
process has ended. The result is the file ``ended-RANK``.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist

import holdfast

END = sys.argv[1]
RANK = int(os.environ.get("RANK", "0"))
RANKS = int(os.environ.get("WORLD_SIZE", "1"))


class Trainer:
    """A trainer that holds the session, and does not know when the script ends."""

    def __init__(self) -> None:
        torch.manual_seed(1)
        self.model: torch.nn.Module = torch.nn.Linear(4, 2)
        if RANKS > 1:
            dist.init_process_group("gloo")
            self.model = torch.nn.parallel.DistributedDataParallel(self.model)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.session = holdfast.session(model=self.model, optimizer=self.optimizer, checkpoint="ckpt")
        self.session.__enter__()

    def fit(self) -> None:
        """Train for 4 epochs of 3 steps, with a collective after each epoch."""
        for epoch in self.session.epochs(4):
            for step in self.session.steps(range(3)):
                with step as item:
                    self.optimizer.zero_grad()
                    self.model(torch.full((2, 4), 0.1 * item + epoch)).pow(2).sum().backward()
                    self.optimizer.step()
            if epoch == 1 and RANK == RANKS - 1:
                end_once()
            if RANKS > 1:
                dist.all_reduce(torch.ones(1))


def end_once() -> None:
    """End this process in the way of the argument, in the first process only."""
    if END in ("", "close", "fork") or Path("ended").exists():
        return
    Path("ended").touch()
    if END == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if END == "exit":
        sys.exit(7)
    raise ValueError("a defect of the script")


trainer = Trainer()
trainer.fit()
Path(f"ended-{RANK}").write_text(str([each.tolist() for each in trainer.model.parameters()]))
if END == "fork":
    if os.fork() == 0:
        sys.exit(0)
    os.wait()
if END in ("close", "fork"):
    trainer.session.__exit__(None, None, None)
