"""Two ranks whose schedule follows the mean loss: ``cut_job.py --way WAY --result DIR [--kill STEP]``.

WAY is the place where the schedule moves:

- ``behind``: after the block, after the mean of the losses;
- ``first``: after the block, before the mean;
- ``validated``: like ``first``, after a forward pass without gradients;
- ``block``: in the block.

With ``--kill``, rank 1 is killed once, after the block of this step and before the mean of the losses.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss
from torch.optim.lr_scheduler import ReduceLROnPlateau

import holdfast

STEPS = 12


class Layer(nn.Linear):
    """A layer that also takes a list of rows. The search reads the class of tensors in its source."""

    def forward(self, x: torch.Tensor | list[torch.Tensor]) -> torch.Tensor:
        """Return the result for each row."""
        return super().forward(x if isinstance(x, torch.Tensor) else torch.stack(x))


def mean(loss: torch.Tensor) -> float:
    """Return the mean of a loss over the ranks."""
    total = loss.detach().clone()
    dist.all_reduce(total)
    return float(total) / dist.get_world_size()


def main() -> None:
    """Train, and write the weights of this rank."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--way", required=True)
    parser.add_argument("--result", type=Path, required=True)
    parser.add_argument("--kill", type=int, default=-1)
    given = parser.parse_args()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    raw = Layer(4, 1)
    model = nn.parallel.DistributedDataParallel(raw)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    plateau = ReduceLROnPlateau(optimizer, factor=0.7, patience=0, threshold=0.05)
    numbers = torch.Generator().manual_seed(7 + rank)
    inputs = torch.randn(STEPS, 8, 4, generator=numbers)
    wanted = inputs.sum(-1, keepdim=True) + torch.randn(STEPS, 8, 1, generator=numbers)
    struck = Path("struck")
    with holdfast.session(model=model, optimizer=optimizer, state={"plateau": plateau}) as s:
        for step in s.steps(until=STEPS):
            with step:
                optimizer.zero_grad()
                loss = mse_loss(model(inputs[step.number]), wanted[step.number])
                loss.backward()  # type: ignore[no-untyped-call]
                seen = mean(loss) if given.way == "block" else 0.0
                optimizer.step()
                if given.way == "block":
                    plateau.step(seen)
            if not step.committed:
                continue
            if given.way == "validated":
                with torch.no_grad():
                    model(inputs[step.number])
            if given.way in ("first", "validated"):
                plateau.step(1.0)
            if rank == 1 and step.number == given.kill and not struck.exists():
                struck.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            seen = mean(loss)
            if given.way == "behind":
                plateau.step(seen)
    given.result.mkdir(exist_ok=True)
    weights = {name: value.tolist() for name, value in raw.state_dict().items()}
    rate = optimizer.param_groups[0]["lr"]
    (given.result / str(rank)).write_text(json.dumps([weights, rate]))


if __name__ == "__main__":
    main()
