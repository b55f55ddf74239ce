"""Restoring values into the objects that the user's own code holds."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from itertools import zip_longest
from typing import Any

import numpy as np

Fill = Callable[[Any, Any], bool]
"""Copies the contents of the second tensor into the first; returns False if they are not two matching tensors."""


def put_into(current: Any, value: Any, fill: Fill) -> Any:
    """Give ``current`` the contents of ``value`` where possible; return the object that belongs in its place.

    Code that holds a tensor, an array or a container then sees the new contents without fetching it again. Numbers,
    text, tuples and values of another shape or type cannot be filled: they are replaced.
    """
    if fill(current, value) or _fill_array(current, value):
        return current
    if isinstance(current, dict) and isinstance(value, dict):
        items = {key: put_into(current.get(key), item, fill) for key, item in value.items()}
        current.clear()
        current.update(items)
        return current
    if isinstance(current, list) and isinstance(value, list):
        pairs = zip_longest(current[: len(value)], value)
        current[:] = [put_into(old, new, fill) for old, new in pairs]
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


def _fill_array(current: Any, value: Any) -> bool:
    if not (
        isinstance(current, np.ndarray)
        and isinstance(value, np.ndarray)
        and (current.dtype, current.shape) == (value.dtype, value.shape)
        and current.flags.writeable
    ):
        return False
    current[...] = value
    return True


def has_state(item: Any) -> bool:
    """Return True if the object has ``state_dict`` and ``load_state_dict``, as torch's have."""
    return callable(getattr(item, "state_dict", None)) and callable(getattr(item, "load_state_dict", None))
