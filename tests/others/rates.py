"""A learning rate that is counted by a global variable of this module."""

from __future__ import annotations

import torch

count = 0.0


def advance(optimizer: torch.optim.Optimizer, highest: float) -> None:
    """Count a step, and set the rate."""
    global count
    count += 1
    for group in optimizer.param_groups:
        group["lr"] = highest * min(1.0, count / 12)
