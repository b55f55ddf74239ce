"""The restoring of values, including torch tensors, into the objects that the user's own code holds."""

from __future__ import annotations

from typing import Any

import torch

from holdfast.frameworks.common import restore_in_place
from holdfast.frameworks.torch.state.boxes import lies_as, overlaps


def put_into(current: Any, value: Any) -> Any:
    """Copy the contents of ``value`` into the object ``current`` where possible, and return the object to use.

    Tensors, arrays and containers are filled in place; where that is not possible, the result has the new value.
    """
    return restore_in_place.put_into(current, value, _fill)


def _fill(current: Any, value: Any) -> bool:
    """Copy ``value`` into ``current``, a tensor of equal dtype, shape, device and sharding.

    Return False, without a copy, if these are not two such tensors.
    """
    if not (isinstance(current, torch.Tensor) and isinstance(value, torch.Tensor)):
        return False
    if current.dtype is not value.dtype or not lies_as(value, current) or overlaps(current):
        return False
    with torch.no_grad():
        current.copy_(value)
    return True
