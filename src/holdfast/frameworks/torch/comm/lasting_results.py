"""The results of collectives that DDP waits for again in later passes.

Theory. In its first pass, DDP with ``static_graph`` sums over the ranks which parameters have a gradient. It uses the
sum in all later passes, and waits for it again after each reset of the reducer. In a process that joins or resumes, the
first pass is a rehearsal, in which a collective completes on local data, and a later wait for such a collective is
refused as an error of the script. So DDP's tensors are registered here: their collectives may be waited for at any
time. If the sum is known from the loaded state, it takes the place of the local data.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch


class LastingResults:
    """The tensors of these collectives, and their results as far as they are known."""

    def __init__(self) -> None:
        # By address. The tensors are referred to, so that no other tensor gets the address.
        self._known: dict[int, tuple[torch.Tensor, Sequence[int]]] = {}

    def add(self, tensor: torch.Tensor, result: Sequence[int] = ()) -> None:
        """Register a tensor, and the ``result`` of its collective; empty: it is not known."""
        self._known[tensor.data_ptr()] = tensor, result

    def complete(self, outputs: Sequence[Any]) -> bool:
        """Fill the output of a collective without peers with its known result.

        Returns:
            False if the output is not registered.
        """
        found = outputs[0] if len(outputs) == 1 and self._known else None
        if not isinstance(found, torch.Tensor) or found.dtype is not torch.int32:
            return False
        known = self._known.get(found.data_ptr()) if found.layout is torch.strided else None
        if known is None:
            return False
        tensor, result = known
        if len(result) == tensor.numel():
            tensor.copy_(torch.tensor(result, dtype=tensor.dtype))
        return True


@cache
def lasting_results() -> LastingResults:
    """Return the object of this process."""
    return LastingResults()
