"""Rank 1 alone leaves its loop by ``break`` in the middle of the training, which is a mistake of the script."""

from __future__ import annotations

import torch
import torch.distributed as dist

import holdfast

LEFT_AT, STEPS = 30, 40


def main() -> None:
    """Train."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with holdfast.session(model=model, optimizer=optimizer) as s:
        for step in s.steps(until=STEPS):
            with step:
                model(torch.ones(4, 8)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
            if dist.get_rank() == 1 and step.number == LEFT_AT:
                break
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
