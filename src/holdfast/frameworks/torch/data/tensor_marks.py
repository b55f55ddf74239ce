"""Whether a tensor of a batch was written since a moment: torch counts writes, other changes are seen beside that."""

from __future__ import annotations

from typing import Any

import torch

from holdfast.frameworks.torch.state.boxes import writes_of


def mark(item: Any) -> object:
    """Other than an earlier one when the tensor was written, reshaped in place, or takes part in a graph since.

    None: ``item`` is no tensor. Where torch does not count writes (made in inference mode) no two marks are equal.
    """
    if not isinstance(item, torch.Tensor):
        return None
    if item.is_inference():
        return object()
    return writes_of(item), item.requires_grad, item.is_leaf and item.grad is not None, tuple(item.shape)


def duplicate(tensor: torch.Tensor) -> torch.Tensor:
    """A copy, which asks for a gradient when the tensor does."""
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def share_memory(item: Any, tensor: torch.Tensor) -> bool:
    """They are the same, or lie in one storage."""
    if not isinstance(item, torch.Tensor):
        return False
    if item is tensor:
        return True
    if item.layout != torch.strided or tensor.layout != torch.strided:
        return False
    return item.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr() != 0
