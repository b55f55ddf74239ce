"""What the store's benchmarks share: one number of all ranks, and one line of all rounds."""

from __future__ import annotations

import statistics

import torch
import torch.distributed as dist


def slowest(value: float) -> float:
    """The maximum over the ranks."""
    tensor = torch.tensor([value], dtype=torch.float64)
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    return float(tensor.item())


def spread(values: list[float]) -> str:
    """Minimum, median, maximum."""
    return f"{min(values):.3f} / {statistics.median(values):.3f} / {max(values):.3f}"
