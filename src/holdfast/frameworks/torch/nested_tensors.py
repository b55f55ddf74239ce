"""The tensors in lists, tuples and dicts, as modules return them and calls of torch take them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yield ``value`` if it is a tensor, and all tensors in lists, tuples and mappings. Other values are left out.

    Example:
        ``list(tensors_in((x, {"a": [y]}, 3)))`` is ``[x, y]``.
    """
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item)
