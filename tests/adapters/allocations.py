"""What operations of torch allocate, counted tensor by tensor: torch has no such count on the CPU."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Allocations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While it is on: bytes of new memory in all (``total``), and the most that lived at one time (``peak``)."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.total = self.peak = self._now = 0
        self._users: Counter[int] = Counter()  # of memory that was made meanwhile, by its address

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
            return  # a view of what was there before
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
