"""The search for impure inputs of a block: tensors of its previous run, and random generators that are not put back.

Theory. If a block computes a different result when it runs again, it uses a value that its previous run has left in a
variable. Two such runs are recorded. In the first run, each tensor that the block makes or writes is noted, with the
line of the script. Parameters, buffers, optimizer state and the user's state in the session are not noted, because
they are put back between the runs. Both runs make the same calls of torch, until a call depends on a value that
differs. The first call of the second run that reads another value than in the first run shows the impure input. That
is a noted tensor, or a tensor that no call of torch has made. If the second run itself has made the tensor, the cause
is a value that is not a tensor. If the two runs make different calls before such a call, the first noted tensor that
the second run reads is taken for the cause. A call that only adds to a tensor in place (a sum for statistics)
computes nothing from it. Such a sum is the cause only if another call reads it later.
"""

from __future__ import annotations

import os
import sys
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import FrameType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from holdfast.frameworks.torch.nested_tensors import tensors_in
from holdfast.frameworks.torch.state.boxes import local_of, writes_of
from holdfast.frameworks.torch.state.tensor_digest import digest_of_tensor
from holdfast.runtime.worker.script_frames import LIBRARIES, OURS, frames_outside, place_of

_LEFT_OUT = (os.path.dirname(torch.__file__) + os.sep, OURS)
_WRAPPERS = os.path.join(os.path.dirname(torch.__file__), "distributed", "fsdp", "")
_WRAPPER_DEPTH = 4  # frames between a wrapper and the call that is seen
_OVERWRITES = ("__setitem__", "copy_", "fill_", "zero_")  # calls that do not read the tensor that they write
_SUMS = ("__iadd__", "__isub__", "__imul__", "__itruediv__")
_Call = tuple[str, tuple[int, ...]]  # the function, and digests of the values that it reads
_Made = tuple["weakref.ref[torch.Tensor]", str]


class Witness(TorchFunctionMode):
    """A recorder of the tensors that a block makes, writes and uses in its runs.

    Args:
        generators: the random generators that are seeded for each step.
        known: tensors that are restored after a run without effect.

    Attributes:
        cause: the impure input that was found, in words, or empty.
        paused: True while calls of torch are not recorded, because they are not of the block.
    """

    def __init__(self, generators: Iterable[object], known: Iterable[torch.Tensor]) -> None:
        super().__init__()
        self.paused = False
        self._left = ""  # the first use of a tensor of the previous run, in words
        self._added = ""  # the same of a tensor that was only added to
        self._sums: dict[int, _Made] = {}  # changed in place from values that differ, by id
        self._found: str | None = None  # the first value that differs, in words; empty: this run has made it
        self._calls: list[_Call] = []
        self._calls_before: list[_Call] | None = None  # None: no run to compare with
        self._generators = {id(generator) for generator in generators}
        self._known = {id(tensor) for tensor in known}
        self._before: dict[int, _Made] = {}  # tensors of the previous run, by id
        self._made: dict[int, _Made] = {}

    @property
    def cause(self) -> str:
        """The impure input that was found, in words, or empty."""
        return self._left or self._added if self._found is None else self._found

    def turn(self) -> None:
        """Begin to record another run of the block."""
        self._calls_before, self._calls = (self._calls or None), []
        self._before, self._made, self._sums = self._made, {}, {}

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Record a call of torch in the block, and return its result."""
        given = kwargs or {}
        if self.paused or _in_wrapper():
            return func(*args, **given)
        used = list(tensors_in((*args, given)))
        if self._found is None:
            written = {id(tensor) for tensor in tensors_in(given.get("out"))}
            self._look(func, [each for each in used if id(each) not in written], given.get("generator"))
        writes = [writes_of(tensor) for tensor in used]
        result = func(*args, **given)
        for tensor, before in zip(used, writes, strict=True):
            if writes_of(tensor) != before and not self._knows(tensor):
                self._made[id(tensor)] = weakref.ref(tensor), f"{_line()} wrote"
        ids = {id(tensor) for tensor in used}
        for tensor in tensors_in(result):
            # Skip a result that is also an argument: it was written in place.
            if id(tensor) not in ids and not self._knows(tensor):
                self._made[id(tensor)] = weakref.ref(tensor), f"{_line()} made"
        return result

    def _knows(self, tensor: torch.Tensor) -> bool:
        """Return True if the tensor was noted in this run, or is put back after a run."""
        noted = self._made.get(id(tensor))
        return id(tensor) in self._known or (noted is not None and noted[0]() is tensor)

    def _look(self, func: Callable[..., Any], used: Sequence[torch.Tensor], generator: object) -> None:
        """Look for an impure input of a call of torch.

        An input is impure if its values differ from those in the same call of the previous run. An input that the
        previous run has made or written is also impure.
        """
        if generator is not None and id(generator) not in self._generators:
            self._found = f"{_line()} draws from a generator that is not in session(state=...)"
            return
        name = getattr(func, "__name__", "")
        read = used[1:] if name in _OVERWRITES else used
        call = (name, tuple(map(_digest, read)))
        self._calls.append(call)
        if self._calls_before is None:
            return
        number = len(self._calls) - 1
        then = self._calls_before[number] if number < len(self._calls_before) else ("", ())
        if then[0] != name or len(then[1]) != len(call[1]):
            self._calls_before = None
        else:
            for number, (tensor, one, other) in enumerate(zip(read, then[1], call[1], strict=True)):
                if one != other and number == 0 and _adds(name):
                    self._sums.setdefault(id(tensor), (weakref.ref(tensor), self._origin(tensor)))
                elif one != other:
                    self._found = self._origin(tensor)
                    return
        if not self._left:
            left = [self._leftover(tensor) for tensor in read]
            self._added = self._added or (left[0] if left and _adds(name) else "")
            self._left = next(filter(None, left[_adds(name) :]), "")

    def _origin(self, tensor: torch.Tensor) -> str:
        """Return a description of ``tensor``, whose values differ from the previous run.

        The description is empty if this run has made the tensor: its difference then has another cause.
        """
        ref, origin = self._sums.get(id(tensor), (None, ""))
        if ref is not None and ref() is tensor:
            return origin
        if self._knows(tensor):
            return ""
        kind = str(tensor.dtype).removeprefix("torch.")
        other = f"{_line()} uses a {kind} {list(tensor.shape)} that has other values than in the run before"
        return self._leftover(tensor) or other

    def _leftover(self, tensor: torch.Tensor) -> str:
        """Return a description of the use of ``tensor`` if the previous run made or wrote it; otherwise empty."""
        ref, left = self._before.get(id(tensor), (None, ""))
        if ref is None or ref() is not tensor:
            return ""
        kind = str(tensor.dtype).removeprefix("torch.")
        return f"{_line()} uses the {kind} {list(tensor.shape)} that {left} in the run before"


def _adds(name: str) -> bool:
    """Return True for a call that changes its first tensor in place, from the values of this tensor."""
    return name in _SUMS or (name.endswith("_") and not name.endswith("__") and name not in _OVERWRITES)


def _digest(tensor: torch.Tensor) -> int:
    try:
        held = local_of(tensor.detach())
        # FSDP2 resizes the memory of gathered weights. It has none of them now, or NumPy must not see it (in a copy).
        return digest_of_tensor(held.clone()) if held.untyped_storage().nbytes() else 0
    except (RuntimeError, NotImplementedError, TypeError):  # the tensor holds no values (device "meta")
        return 0


def _in_wrapper() -> bool:
    """Return True in a call by a wrapper of torch (FSDP2), which works on memory that it gathers and frees."""
    frame: FrameType | None = sys._getframe(2)
    for _ in range(_WRAPPER_DEPTH):
        if frame is None:
            return False
        if frame.f_code.co_filename.startswith(_WRAPPERS):
            return True
        frame = frame.f_back
    return False


def _line() -> str:
    """Return file and line of the script that calls torch now, directly or through a library."""
    frames = list(frames_outside(_LEFT_OUT))
    of_script = (frame for frame in frames if not frame.f_code.co_filename.startswith(LIBRARIES))
    return place_of(next(of_script, frames[0] if frames else sys._getframe(1)))
