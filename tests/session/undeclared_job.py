"""A training with a second model that the script changes behind the update, outside of the session.

Arguments: the number of steps between two changes, and a file that names the step at which rank 1 kills itself
(``-``: no step).
"""

from __future__ import annotations

import copy
import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist

import holdfast

STEPS = 12


def main(every: int, kill: str) -> None:
    """Train, and change the other model at each step whose number is a multiple of ``every``, plus 1."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    net = torch.nn.Linear(8, 8)
    target = copy.deepcopy(net)
    model = torch.nn.parallel.DistributedDataParallel(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with holdfast.session(model=model, optimizer=optimizer) as s:
        for step in s.steps(until=STEPS):
            with step:
                if dist.get_rank() == 1 and kill == str(step.number) and not Path("killed").exists():
                    Path("killed").touch()
                    os.kill(os.getpid(), signal.SIGKILL)
                optimizer.zero_grad()
                model(torch.ones(2, 8)).square().sum().backward()
                optimizer.step()
            if step.committed and step.number % every == every - 1:
                with torch.no_grad():
                    torch._foreach_lerp_(
                        list(target.parameters()), [p.detach() for p in net.parameters()], 0.5
                    )
    Path(f"target-{dist.get_rank()}").write_text(str(target.weight.sum().item()))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
