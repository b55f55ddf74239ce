"""Helpers of the benchmarks: the slowest value of all ranks, quantiles, and the spread over all rounds."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import torch
import torch.distributed as dist


def slowest(value: float) -> float:
    """Return the maximum over the ranks."""
    tensor = torch.tensor([value], dtype=torch.float64)
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    return float(tensor.item())


def quantile(ordered: Sequence[float], share: float) -> float:
    """Return the value below which ``share`` of the values lie. ``ordered`` is sorted and not empty."""
    return ordered[min(int(len(ordered) * share), len(ordered) - 1)]


def spread(values: list[float]) -> str:
    """Return minimum, median and maximum as text."""
    return f"{min(values):.3f} / {statistics.median(values):.3f} / {max(values):.3f}"
