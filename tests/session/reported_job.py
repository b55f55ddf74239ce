"""Two ranks that report what they have counted: ``reported_job.py --kill RANK PLACE [--epochs] [--keep]``.

PLACE is the place where the rank is killed once: ``step`` (after the block of step 3) or ``end`` (after the loop).

With ``--epochs`` the steps are in epochs. With ``--keep`` the session keeps what the script reports.
"""

from __future__ import annotations

import argparse
import os
import signal
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import holdfast
from holdfast.session.steps.step import Step
from tests.session.library import AverageMeter

STEPS, EPOCHS = 6, 2


class Meter:
    """A sum and a number."""

    def __init__(self) -> None:
        self.total, self.count = 0.0, 0

    def update(self, value: float) -> None:
        """Add a value."""
        self.total += value
        self.count += 1


def main() -> None:
    """Train, and print what this rank reports."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--kill", nargs=2, default=("", ""))
    parser.add_argument("--epochs", action="store_true")
    parser.add_argument("--keep", action="store_true")
    given = parser.parse_args()
    dist.init_process_group("gloo")
    rank, struck = dist.get_rank(), Path("struck")

    def die(place: str) -> None:
        if [str(rank), place] == list(given.kill) and not struck.exists():
            struck.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    best, losses, meter, rates, grads = {"loss": 1e9}, list[float](), Meter(), torch.zeros(2), AverageMeter()
    smallest, end = 1e9, time.time()
    kept = {"best": best} if given.keep else {}

    def train(step: Step) -> None:
        nonlocal smallest, rates, end
        with step:
            optimizer.zero_grad()
            inputs = torch.randn(8, 4, generator=torch.Generator().manual_seed(step.number))
            loss = model(inputs).square().mean()
            loss.backward()
            optimizer.step()
        if not step.committed:
            return
        value = loss.item()
        best["loss"] = min(best["loss"], value)
        meter.update(value)
        if not given.keep:
            losses.append(value)
            grads.update(value)
            smallest = min(smallest, value)
            rates += value
        print("took", time.time() - end)
        end = time.time()
        die("step" if step.number == 3 else "")

    with holdfast.session(model=model, optimizer=optimizer, state=kept, checkpoint="ckpt") as s:
        if given.keep:
            meter = s.attach("meter", meter)
        if given.epochs:
            for _ in s.epochs(EPOCHS):
                for step in s.steps(range(STEPS)):
                    train(step)
        else:
            for step in s.steps(range(STEPS * EPOCHS)):
                train(step)
        die("end")
        print("reports", best["loss"], meter.count, len(losses), smallest, rates.sum().item(), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
