"""An evaluation after the last step of each epoch. A rank is killed in the evaluation of the last epoch."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset

import holdfast

EPOCHS, EPOCH_STEPS = 2, 3
LAST_STEP = EPOCHS * EPOCH_STEPS - 1


def evaluate(died: Path) -> None:
    """Sum a value over all ranks. In the last epoch, rank 1 dies when all are inside."""
    dist.all_reduce(torch.ones(1))
    if dist.get_rank() == 1 and died.name == str(LAST_STEP) and not died.exists():
        died.write_text("")
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.ones(1))


def main(place: Path) -> None:
    """Train."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(TensorDataset(torch.randn(EPOCH_STEPS, 8)))
    with holdfast.session(model=model, optimizer=optimizer, seed=3) as s:
        for step in s.steps(loader, epochs=EPOCHS):
            with step as batch:
                model(batch[0]).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
            if step.committed and step.last_in_epoch:
                with s.section("eval"):
                    evaluate(place / str(step.number))
                if dist.get_rank() == 0:
                    print(f"evaluated after step {step.number}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
