"""Three ranks whose user state has different tensors, from different steps; saves in the blocks of some steps.

``python layout_job.py --save STEP --save STEP --die RANK:STEP --result DIR``: rank RANK is killed when it begins the
block of STEP. With ``--doubt`` it is killed in the vote of STEP, which one rank has entered and another has not.
``--alike``: no rank alone holds anything. The state of each rank is written when its session has opened, and at the
end.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import holdfast
from holdfast.runtime.worker.worker_client import WorkerClient

STEPS = 12
SEALED_S_MAX = 2.0
DOUBT_S = 1.0


class Growing:
    """State whose tensors appear step by step, on each rank at its own steps and in its own shape."""

    def __init__(self, rank: int, alike: bool) -> None:
        self.rank = rank
        self.alike = alike
        self.common: Tensor | None = None
        self.own: dict[str, Tensor] = {}

    def grow(self, step: int, loss: Tensor) -> None:
        """Advance the state after ``step``."""
        if step == 2 + (3 * self.rank + 1) % 5:  # at steps 3, 6 and 4
            self.common = torch.full((5,), 0.5)
        if (step + self.rank) % 3 == 0 and not self.alike:
            shape = (self.rank + 1, step + 1)
            self.own[f"r{self.rank}s{step}"] = loss.detach() * torch.ones(shape)
        if len(self.own) > 2:
            del self.own[min(self.own)]

    def state_dict(self) -> dict[str, Any]:
        """Return the state, as torch's objects do."""
        return {"common": self.common, "own": dict(self.own)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take a state back."""
        self.common, self.own = state["common"], dict(state["own"])

    def write(self, path: Path) -> None:
        """Write the whole state, bit for bit."""
        common = None if self.common is None else self.common.tolist()
        path.write_text(json.dumps([common, {name: t.tolist() for name, t in sorted(self.own.items())}]))


def await_seal(step: int) -> None:
    """Wait until a save is sealed: a save that is requested before that is delayed."""
    until_s = time.monotonic() + SEALED_S_MAX
    while not list(Path("ckpt").glob(f"step-{step:08d}.*/SEALED")) and time.monotonic() < until_s:
        time.sleep(0.01)
    time.sleep(0.05)


def die_in_vote(rank: int, victim: int, again: bool, died: Path) -> None:
    """Kill the victim in the vote of its step. Rank 0 reaches the vote after the fault."""
    client = WorkerClient.current()
    assert client is not None
    if rank == 0:
        while not (again or client.fenced):
            time.sleep(0.01)
    elif rank == victim and not died.exists():
        died.touch()
        threading.Timer(DOUBT_S, os.kill, (os.getpid(), signal.SIGKILL)).start()


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--save", type=int, action="append", default=[])
    parser.add_argument("--die", default="-1:-1")
    parser.add_argument("--doubt", action="store_true")
    parser.add_argument("--alike", action="store_true")
    parser.add_argument("--result", type=Path, required=True)
    arguments = parser.parse_args()
    victim, at = map(int, arguments.die.split(":"))
    dist.init_process_group("gloo")
    rank, died = dist.get_rank(), arguments.result / "died"
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    growing = Growing(rank, arguments.alike)
    with holdfast.session(
        model=model, optimizer=optimizer, state={"growing": growing}, checkpoint="ckpt", keep=STEPS
    ) as s:
        growing.write(arguments.result / f"opened-{rank}-{s.step}")
        for step in s.steps(until=STEPS):
            if step.number - 1 in arguments.save:
                await_seal(step.number)
            with step:
                if (rank, step.number) == (victim, at) and not (died.exists() or arguments.doubt):
                    died.touch()
                    os.kill(os.getpid(), signal.SIGKILL)
                if step.number in arguments.save:
                    s.save()
                loss = model(torch.full((4, 2), 1.0 + step.number + rank)).square().mean()
                loss.backward()
                if arguments.doubt and step.number == at:
                    die_in_vote(rank, victim, step.again, died)
                optimizer.step()
                optimizer.zero_grad()
                growing.grow(step.number, loss)
    growing.write(arguments.result / f"ended-{rank}")


if __name__ == "__main__":
    main()
