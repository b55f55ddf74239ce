"""DDP on two ranks, with a mistake that only rank 1 makes: ``python mistake_job.py MISTAKE``."""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist

import holdfast

AT, STEPS = 5, 12


def main() -> None:
    """Train."""
    dist.init_process_group("gloo")
    mistake = sys.argv[1] if dist.get_rank() == 1 else ""
    if mistake == "exit before the model":
        sys.exit(0)
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with holdfast.session(model=model, optimizer=optimizer) as s:
        if mistake == "exit before the loop":
            sys.exit(0)
        for step in s.steps(until=STEPS):
            with step:
                if step.number == AT and mistake == "break in the block":
                    break
                if step.number == AT and mistake == "exit in the block":
                    sys.exit(0)
                if step.number == AT and mistake == "all memory in the block":
                    torch.ones(4 << 30, dtype=torch.uint8)
                model(torch.ones(4, 8)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
