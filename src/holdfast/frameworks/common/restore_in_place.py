"""The restoration of values into the objects that the user's own code holds."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from itertools import zip_longest
from typing import Any

import numpy as np

from holdfast.runtime.worker.script_attributes import attribute_of

Fill = Callable[[Any, Any], bool]
"""A function that copies the contents of the second tensor into the first. False: they do not match."""


def put_into(current: Any, value: Any, fill: Fill) -> Any:
    """Copy the contents of ``value`` into the object ``current`` where possible. Return the object to use.

    Code that holds a tensor, an array or a container then sees the new contents without fetching the object again. If
    ``current`` cannot be filled (numbers, text, tuples, another shape or type), ``value`` itself is returned.
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
    """Return True if the object has the methods ``state_dict`` and ``load_state_dict``, like objects of torch."""
    return all(callable(attribute_of(item, name)) for name in ("state_dict", "load_state_dict"))
