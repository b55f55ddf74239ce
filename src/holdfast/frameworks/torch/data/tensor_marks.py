"""Marks that show if a tensor of a batch was changed: torch's count of writes, and other visible changes."""

from __future__ import annotations

from typing import Any

import torch

from holdfast.frameworks.torch.state.boxes import writes_of


def mark(item: Any) -> object:
    """Return a mark that changes when the tensor is written, reshaped in place, or becomes part of a graph.

    Returns:
        None if ``item`` is not a tensor. For a tensor whose writes torch does not count (inference mode), each mark
        differs from all others.
    """
    if not isinstance(item, torch.Tensor):
        return None
    if item.is_inference():
        return object()
    return writes_of(item), item.requires_grad, item.is_leaf and item.grad is not None, tuple(item.shape)


def duplicate(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy of a tensor; the copy requires a gradient if the tensor does."""
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)
