"""A count of the memory that operations of torch allocate, tensor by tensor: torch has no such count on the CPU."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Allocations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A mode that counts allocated bytes: all of them (``total``), and the most that existed at one time (``peak``)."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.total = self.peak = self._now = 0
        # number of users of memory that was allocated under this mode, by its address
        self._users: Counter[int] = Counter()

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        given = {self._address(t) for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                self._note(tensor, given)
        return out

    def _note(self, tensor: torch.Tensor, given: set[int]) -> None:
        address, size = self._address(tensor), tensor.untyped_storage().nbytes()
        if address not in self._users and address in given:
            return  # a view of memory that existed before
        if address not in self._users:
            self.total += size
            self._now += size
            self.peak = max(self.peak, self._now)
        self._users[address] += 1
        weakref.finalize(tensor, self._drop, address, size)

    def _drop(self, address: int, size: int) -> None:
        self._users[address] -= 1
        if not self._users[address]:
            del self._users[address]
            self._now -= size

    @staticmethod
    def _address(tensor: torch.Tensor) -> int:
        return tensor.untyped_storage().data_ptr()
