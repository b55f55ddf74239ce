"""The user's own state, given as ``session(state={...})``, for frameworks whose tensors are read from host memory.

Theory. An entry is a tree of plain values, NumPy arrays and tensors of the framework (parameters, variables), or an
object with ``state_dict`` and ``load_state_dict``. Arrays and tensors are saved as tensors of the job, named by their
key path. All other values are saved as plain values. The script may change its state at any time. So copies are made
twice: when the script is given a step, and when the block of this step begins. A restored value is written into the
object that the script holds.

Invariants:
1. A :class:`Taken` shares no memory with the state.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from holdfast.errors import CheckpointMismatch, StateError
from holdfast.frameworks.common.numpy_state import DTYPE_NAMES, dtype_named
from holdfast.frameworks.common.restore_in_place import has_state, put_into
from holdfast.frameworks.common.state_tree import Plain, join, split
from holdfast.store.layouts.layout import Box, Catalogue, TensorMeta

log = logging.getLogger("holdfast")

Array = NDArray[Any]
PREFIX = "state."


class UserTensors(Protocol):
    """The operations on a framework's tensors that :class:`UserState` needs."""

    def owns(self, item: Any) -> bool:
        """Return True if ``item`` is a tensor of the framework."""

    def read(self, item: Any) -> Array:
        """Return the values of a tensor. The array may share memory with the tensor."""

    def make(self, array: Array) -> Any:
        """Return a new tensor with these values."""

    def fill(self, current: Any, value: Any) -> bool:
        """Copy the values of ``value`` into the tensor ``current``. Return False if ``current`` cannot take them."""


class Taken(NamedTuple):
    """A copy of the user's state at one moment: plain values by entry name, and arrays by tensor name.

    A plain value refers to an array by its tensor name.
    """

    plain: Mapping[str, Plain]
    arrays: Mapping[str, Array]

    def metas(self) -> tuple[TensorMeta, ...]:
        """Return the metadata of the arrays. Each array is whole on this rank."""
        return tuple(
            TensorMeta(fqn, DTYPE_NAMES[array.dtype.name], array.shape, Box.whole(array.shape))
            for fqn, array in self.arrays.items()
        )


NOTHING_TAKEN = Taken({}, {})


class UserStateBefore(NamedTuple):
    """Copies that were made when the script was given ``step``, or when a loop ended.

    The script may change the originals from then on.
    """

    step: int
    arrays: Mapping[str, Array]  # of the optimizer, by tensor name
    extras: Taken


NOTHING_BEFORE = UserStateBefore(-2, {}, NOTHING_TAKEN)


class UserState:
    """The user's own state of one rank.

    Args:
        items: the dict that the user gave, by entry name.
        tensors: the framework's tensor operations.

    Raises:
        StateError: a value cannot be saved; the error names its key path and type.
    """

    def __init__(self, items: dict[str, Any], tensors: UserTensors) -> None:
        self._items = items
        self._tensors = tensors
        self.take()

    def take(self) -> Taken:
        """Return copies of the current values. Raises: StateError: a value cannot be saved."""
        arrays: dict[str, Array] = {}

        def add(value: Any, path: str) -> Plain:
            own = isinstance(value, np.ndarray)
            if not own and not self._tensors.owns(value):
                return None
            if path in arrays:
                raise StateError(f"two tensors of the state are called {path!r}", hint="rename one of them")
            array = np.array(value if own else self._tensors.read(value), order="C")
            if array.dtype.name not in DTYPE_NAMES or not array.dtype.isnative:
                raise StateError(f"{path}: an array of {array.dtype} cannot be saved")
            arrays[path] = array
            return {"array": path} if own else path

        plain = {name: split(_of(item), PREFIX + name, add) for name, item in self._items.items()}
        return Taken(plain, arrays)

    def size(self) -> int:
        """Return a number that changes when an array is added, removed or reshaped."""
        forms: list[object] = []

        def add(value: Any, path: str) -> Plain:
            if not isinstance(value, np.ndarray) and not self._tensors.owns(value):
                return None
            forms.append((path, tuple(value.shape), str(value.dtype)))
            return path

        for name, item in self._items.items():
            split(_of(item), PREFIX + name, add)
        return hash(tuple(forms))

    def put(self, taken: Taken) -> None:
        """Put all values of ``taken`` back into the objects that the script holds."""
        for name, plain in taken.plain.items():
            if name in self._items:
                self._put(name, plain, taken.arrays)

    def prepare(
        self, catalogue: Catalogue, saved: Mapping[str, Plain]
    ) -> tuple[Mapping[str, Array], Callable[[], None]]:
        """Prepare a load of the plain values ``saved``.

        Returns:
            The arrays to fill, by tensor name, and a function to call when they are filled.

        Raises:
            CheckpointMismatch: the plain values name a tensor that the checkpoint does not hold, or holds in a type
                unknown here.
        """
        tell_other_names(self._items, saved)
        arrays: dict[str, Array] = {}
        mine = {name: plain for name, plain in saved.items() if name in self._items}

        def allocate(stands_for: Plain) -> None:
            fqn = str(stands_for["array"] if isinstance(stands_for, dict) else stands_for)
            entry = catalogue.by_fqn.get(fqn)
            dtype = None if entry is None else dtype_named(entry.dtype)
            if entry is None or dtype is None:
                raise CheckpointMismatch(
                    f"the checkpoint names {fqn}, which it does not hold in a type known here"
                )
            arrays[fqn] = np.empty(entry.shape, dtype)

        join(mine, allocate)
        return arrays, lambda: self.put(Taken(mine, arrays))

    def _put(self, name: str, plain: Plain, arrays: Mapping[str, Array]) -> None:
        def fetch(stands_for: Plain) -> Any:
            if isinstance(stands_for, dict):
                return arrays[stands_for["array"]].copy()
            return self._tensors.make(arrays[stands_for])

        value, item = join(plain, fetch), self._items[name]
        if has_state(item):
            item.load_state_dict(value)
        else:
            self._items[name] = put_into(item, value, self._tensors.fill)


def _of(item: Any) -> Any:
    return item.state_dict() if has_state(item) else item


def tell_other_names(ours: Collection[str], saved: Collection[str]) -> None:
    """Warn about each entry of the user's state that only this run, or only the checkpoint, has."""
    for name in sorted(set(ours) - set(saved)):
        log.warning("holdfast: the checkpoint holds no state called %r; it keeps its initial value", name)
    for name in sorted(set(saved) - set(ours)):
        log.warning("holdfast: the checkpoint holds state called %r, which this run does not have", name)
