"""The memory of tensors: its content, read without an operation of torch, and a test whether two tensors share it."""

from __future__ import annotations

import ctypes
from typing import Any

import torch

from holdfast.frameworks.torch.state.boxes import local_of


def content_of(value: object, size_bytes_max: int) -> bytes | None:
    """Return the content of a plain tensor on the CPU.

    The memory is read directly, because a mode of torch that is active in a block (``TorchFunctionMode``) would record
    an operation of torch.

    Args:
        value: any object.
        size_bytes_max: largest content that is read.

    Returns:
        The content in the order of the elements. None if ``value`` is not such a tensor, is a parameter, is not
        contiguous, or is larger.
    """
    if type(value) is not torch.Tensor or value.device.type != "cpu" or value.layout != torch.strided:
        return None
    if value.nbytes > size_bytes_max or not value.is_contiguous():
        return None
    return ctypes.string_at(value.data_ptr(), value.nbytes) if value.nbytes else b""


def address_of(tensor: torch.Tensor) -> int:
    """Return the address of the memory of this rank's part of a tensor, which its views share; 0 if it has none."""
    if tensor.layout != torch.strided:
        return 0
    try:
        return local_of(tensor).untyped_storage().data_ptr()
    except RuntimeError:  # a class that wraps other tensors has no storage
        return 0


def share_memory(item: Any, tensor: torch.Tensor) -> bool:
    """Return True if ``item`` and ``tensor`` are the same tensor or use one storage."""
    if not isinstance(item, torch.Tensor):
        return False
    # A DTensor has no storage: the addresses are those of the local parts.
    return item is tensor or address_of(item) == address_of(tensor) != 0
