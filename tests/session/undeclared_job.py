"""A training with a second model that the script changes behind the update, outside of the session.

Argument: the number of steps between two changes; ``renewed``: rank 0 alone has an average of the weights, in a dict
that each step makes again; ``late``: the same with a dict that is empty before the first step.
"""

from __future__ import annotations

import copy
import sys

import torch
import torch.distributed as dist

import holdfast

STEPS = 12


def main(every: int) -> None:
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
                optimizer.zero_grad()
                model(torch.ones(2, 8)).square().sum().backward()
                optimizer.step()
            if step.committed and step.number % every == every - 1:
                with torch.no_grad():
                    torch._foreach_lerp_(
                        list(target.parameters()), [p.detach() for p in net.parameters()], 0.5
                    )
    dist.destroy_process_group()


def renew(*, late: bool) -> None:
    """Train, and make a new average of the weights from the one before on rank 0. ``late``: it begins empty."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    net = torch.nn.Linear(8, 8)
    average = {} if late else {name: p.detach().clone() for name, p in net.named_parameters()}
    model = torch.nn.parallel.DistributedDataParallel(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with holdfast.session(model=model, optimizer=optimizer) as s:
        for step in s.steps(until=STEPS):
            with step:
                optimizer.zero_grad()
                model(torch.ones(2, 8)).square().sum().backward()
                optimizer.step()
            if step.committed and dist.get_rank() == 0:
                average = {n: 0.9 * average.get(n, p) + 0.1 * p.detach() for n, p in net.named_parameters()}
    dist.destroy_process_group()


if __name__ == "__main__":
    if sys.argv[1] in ("renewed", "late"):
        renew(late=sys.argv[1] == "late")
    else:
        main(int(sys.argv[1]))
