"""Putting values back into the objects that the user's own code holds."""

from __future__ import annotations

from collections import deque
from itertools import zip_longest
from typing import Any

import numpy as np
import torch

from holdfast.adapters.torch.boxes import lies_as, overlaps


def put_into(current: Any, value: Any) -> Any:
    """Give ``current`` the contents of ``value`` where it can take them; returns what belongs in its place.

    Whoever holds a tensor, an array or a container that is filled need not fetch it again. Numbers, text, tuples and
    what has another form cannot be filled: they are replaced.
    """
    if _takes(current, value):
        return _fill(current, value)
    if isinstance(current, dict) and isinstance(value, dict):
        items = {key: put_into(current.get(key), item) for key, item in value.items()}
        current.clear()
        current.update(items)
        return current
    if isinstance(current, list) and isinstance(value, list):
        pairs = zip_longest(current[: len(value)], value)
        current[:] = [put_into(old, new) for old, new in pairs]
        return current
    if isinstance(current, set) and isinstance(value, set):
        current.clear()
        current.update(value)
        return current
    if isinstance(current, deque) and isinstance(value, deque) and current.maxlen == value.maxlen:
        current.clear()
        current.extend(value)
        return current
    return value


def _takes(current: Any, value: Any) -> bool:
    """True for two tensors, or two arrays, of the same form."""
    if isinstance(current, torch.Tensor) and isinstance(value, torch.Tensor):
        return current.dtype is value.dtype and lies_as(value, current) and not overlaps(current)
    return (
        isinstance(current, np.ndarray)
        and isinstance(value, np.ndarray)
        and (current.dtype, current.shape) == (value.dtype, value.shape)
        and current.flags.writeable
    )


def _fill(current: Any, value: Any) -> Any:
    if isinstance(current, torch.Tensor):
        with torch.no_grad():
            return current.copy_(value)
    current[...] = value
    return current
