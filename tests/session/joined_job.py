"""Two of four ranks are replaced. A survivor is also killed, when one newcomer has joined and the other has not.

The state of the first newcomer is requested then, though its script has already run the code before the block. See
``test_givers.py``.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import holdfast
from holdfast.core.worker import decision_orders
from holdfast.session.steps.participant import StepParticipant
from tests.session.once import first

STEPS = 12
KILLED_AT = 5
JOINED = Path("joined")
VICTIM = Path("victim")
decision_orders.SCRIPT_TIMEOUT_S = 3600.0  # the script waits for other ranks, so no wait for it may end


def kill_between_two_joins(rank: int) -> None:
    """Kill survivor 0 when newcomer 1 waits for the order to continue and newcomer 2 is about to report ready."""
    join, await_resume = StepParticipant.join, StepParticipant.await_resume

    def second(self: StepParticipant) -> None:
        if self.joining and rank == 2 and first(Path("second")):
            while not JOINED.exists():
                time.sleep(0.01)
            time.sleep(0.3)  # time for the report to reach the controller
            os.kill(int(VICTIM.read_text()), signal.SIGKILL)
            time.sleep(0.3)
        join(self)

    def waits(self: StepParticipant) -> None:
        if rank == 1 and VICTIM.exists():
            JOINED.touch()
        await_resume(self)

    StepParticipant.join, StepParticipant.await_resume = second, waits  # type: ignore[method-assign]


def main() -> None:
    """Train."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    kill_between_two_joins(rank)
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with holdfast.session(model=model, optimizer=optimizer, memory=0) as s:
        for step in s.steps(until=STEPS):
            noise = torch.rand(1).item()
            with step:
                if step.number == KILLED_AT and rank == 0 and not JOINED.exists():
                    VICTIM.write_text(str(os.getpid()))
                if step.number == KILLED_AT and rank in (1, 2) and first(Path(f"killed-{rank}")):
                    while not VICTIM.exists():
                        time.sleep(0.01)
                    os.kill(os.getpid(), signal.SIGKILL)
                model(torch.full((2, 4), noise + rank)).square().sum().backward()
                optimizer.step()
                optimizer.zero_grad()
    print(f"ends at {s.step}: {[p.tolist() for p in model.parameters()]}", flush=True)


if __name__ == "__main__":
    main()
