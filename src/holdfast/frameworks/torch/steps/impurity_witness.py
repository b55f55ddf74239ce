"""The search for impure inputs of a block: tensors of its previous run, and random generators that are not put back.

Theory. If a block computes a different result when it runs again, it uses a value that its previous run has left in a
variable. Two such runs are watched. In the first one, each tensor that the block makes, and each outside tensor that it
writes, is noted with the line of the script. In the second one, each use of a noted tensor is reported. Parameters,
buffers, optimizer state and the declared state are not noted, because they were put back.
"""

from __future__ import annotations

import os
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from holdfast.frameworks.torch.state.boxes import writes_of
from holdfast.package import DIRECTORY

_OURS = (os.path.dirname(torch.__file__) + os.sep, str(DIRECTORY) + os.sep)
_Made = tuple["weakref.ref[torch.Tensor]", str]


class Witness(TorchFunctionMode):
    """A recorder of the tensors that a block makes, writes and uses in its runs.

    Args:
        generators: the random generators that are seeded for each step.
        known: tensors that are restored after a run without effect.

    Attributes:
        cause: the finding, in words, or empty.
    """

    def __init__(self, generators: Iterable[object], known: Iterable[torch.Tensor]) -> None:
        super().__init__()
        self.cause = ""
        self._generators = {id(generator) for generator in generators}
        self._known = {id(tensor) for tensor in known}
        self._before: dict[int, _Made] = {}  # tensors of the previous run, by id
        self._made: dict[int, _Made] = {}

    def turn(self) -> None:
        """Begin to record another run of the block."""
        self._before, self._made = self._made, {}

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Record a call of torch in the block, and return its result."""
        given = kwargs or {}
        used = list(_tensors((*args, *given.values())))
        if not self.cause:
            self._look(used, given.get("generator"))
        writes = [writes_of(tensor) for tensor in used]
        result = func(*args, **given)
        for tensor, before in zip(used, writes, strict=True):
            if writes_of(tensor) != before and not self._knows(tensor):
                self._made[id(tensor)] = weakref.ref(tensor), f"{_line()} wrote"
        ids = {id(tensor) for tensor in used}
        for tensor in _tensors((result,)):
            # Skip a result that is also an argument: it was written in place.
            if id(tensor) not in ids and not self._knows(tensor):
                self._made[id(tensor)] = weakref.ref(tensor), f"{_line()} made"
        return result

    def _knows(self, tensor: torch.Tensor) -> bool:
        """Return True if the tensor was noted in this run, or is put back."""
        noted = self._made.get(id(tensor))
        return id(tensor) in self._known or (noted is not None and noted[0]() is tensor)

    def _look(self, used: Iterable[torch.Tensor], generator: object) -> None:
        if generator is not None and id(generator) not in self._generators:
            self.cause = f"{_line()} draws from a generator that is not in session(state=...)"
        for tensor in used:
            ref, left = self._before.get(id(tensor), (None, ""))
            if ref is not None and ref() is tensor:
                kind = str(tensor.dtype).removeprefix("torch.")
                self.cause = f"{_line()} uses the {kind} {list(tensor.shape)} that {left} in the run before"


def _tensors(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)
        elif isinstance(value, dict):
            yield from _tensors(value.values())


def _line() -> str:
    """Return file and line of the script that calls torch now."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_OURS):
        frame = frame.f_back
    return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"
