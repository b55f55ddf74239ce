"""The division of a ``state_dict`` into tensors and plain values, and its inverse.

Theory. A ``state_dict`` is a tree of containers with tensors and plain values at its leaves. :func:`split` visits each
leaf once. It passes each tensor with its key path to the caller, and replaces the tensor by the value that the caller
returns. All other leaves must be values that the store can write exactly (``store/format/json_values.py``).
Containers and numbers that the store does not know (sets, deques, numpy scalars) become a marked dictionary. Nothing is
ever pickled: any other object is refused by name.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np

from holdfast.errors import CheckpointInvalid, StateError
from holdfast.store.format.json_values import VALUES_SIZE_BYTES_MAX

Plain = Any
"""A tree of None, bool, int, float, str, bytes, list, tuple, dict and Counter."""
Leaf = Callable[[Any, str], Plain]
"""A function of an object and its key path: returns the replacement of a tensor, or None for other objects."""
Fetch = Callable[[Plain], Any]
"""A function that returns the tensor for a replacement that a :data:`Leaf` returned."""

MARK = "@"
FACTORIES: dict[str, Callable[[], Any] | None] = {
    "None": None,
    **{kind.__name__: kind for kind in (bool, int, float, str, list, dict, set)},
}
"""The functions that a ``defaultdict`` may call for a missing key, by name."""
ORDER = "order"
DEPTH_MAX = 64
NODES_MAX = VALUES_SIZE_BYTES_MAX // 2
"""The largest number of values in one tree. Each value takes at least two bytes of JSON."""


class InOrder(NamedTuple):
    """The replacement of a tensor whose elements lie in another order in memory than a new tensor's elements would.

    The order matters for the last bits of a matrix product. A :data:`Leaf` may return it.

    Attributes:
        stands_for: the replacement without the order.
        order: the dimensions of the tensor, from the slowest to the fastest in memory.
    """

    stands_for: Plain
    order: tuple[int, ...]


def no_leaf(value: Any, path: str) -> Plain:
    """Return None: ``value`` is not a tensor.

    Give this function to :func:`split` as ``leaf`` if a tree has no tensors.
    """
    return None


def tensor_value(stands_for: Plain) -> dict[str, Plain]:
    """Return the plain value that stands for a tensor.

    ``stands_for`` is the name of the tensor, or the value that ``leaf`` has returned for it.
    """
    return {MARK: "tensor", "v": stands_for}


def split(value: Any, path: str, leaf: Leaf = no_leaf) -> Plain:
    """Return ``value`` with each tensor replaced by the value that ``leaf`` returns for it.

    Args:
        path: key path of ``value``, for errors and for ``leaf``.
        leaf: called with each object and its key path; returns the replacement of a tensor, None for other objects.

    Raises:
        StateError: an object cannot be saved; the error names its key path and type.
    """
    return _Splitter(leaf).split(value, path, 0)


class _Splitter:
    """One :func:`split` of a tree, with a limit on the number of values.

    A list that occurs twice is visited twice, so a few lists may expand to more values than memory holds.
    """

    def __init__(self, leaf: Leaf) -> None:
        self._leaf = leaf
        self._left = NODES_MAX

    def split(self, value: Any, path: str, depth: int) -> Plain:
        if depth > DEPTH_MAX:
            raise StateError(f"{path}: nested deeper than {DEPTH_MAX} levels (does it contain itself?)")
        self._left -= 1
        if self._left < 0:
            raise StateError(f"{path}: more than {NODES_MAX} values", hint="keep large state in tensors")
        stands_for = self._leaf(value, path)
        if isinstance(stands_for, InOrder):
            return {**tensor_value(stands_for.stands_for), ORDER: list(stands_for.order)}
        if stands_for is not None:
            return tensor_value(stands_for)
        kind = type(value)
        if value is None or kind in (bool, int, float, str, bytes, np.float64):
            return value
        # Not kind V (structured, or another library's type): dtype.str does not say what its bytes mean.
        if isinstance(value, np.generic) and value.dtype.kind != "V":
            return {MARK: "scalar", "dtype": value.dtype.str, "v": value.tobytes()}
        return self._container(value, path, depth + 1)

    def _container(self, value: Any, path: str, depth: int) -> Plain:
        kind = type(value)
        if kind in (dict, OrderedDict, Counter):
            if MARK in value:
                raise StateError(f"{path}: the key {MARK!r} is reserved", hint="give it another key")
            made = {key: self.split(item, f"{path}.{key}", depth) for key, item in value.items()}
            return Counter(made) if kind is Counter else made
        if kind is defaultdict and (
            of := [n for n, made in FACTORIES.items() if made is value.default_factory]
        ):
            return {MARK: "defaultdict", "of": of[0], "v": self._container(dict(value), path, depth)}
        if kind is list:
            return self._each(value, path, depth)
        # A tuple subclass with named fields would come back as a plain tuple. For torch.Size that is no loss.
        if isinstance(value, tuple) and (kind is tuple or kind.__name__ == "Size"):
            return tuple(self._each(value, path, depth))
        if kind in (set, frozenset):
            return {MARK: kind.__name__, "v": self._each(sorted(value, key=repr), path, depth)}
        if kind is deque:
            return {MARK: "deque", "max": value.maxlen, "v": self._each(value, path, depth)}
        raise StateError(
            f"{path}: an object of type {kind.__module__}.{kind.__qualname__} cannot be saved",
            hint="offer tensors, numbers, text, lists and dictionaries, or give the object state_dict() and "
            "load_state_dict() that use only these",
        )

    def _each(self, values: Any, path: str, depth: int) -> list[Plain]:
        return [self.split(item, f"{path}.{index}", depth) for index, item in enumerate(values)]


def orders_in(value: Plain) -> dict[Plain, tuple[int, ...]]:
    """Return the recorded memory orders in the result of :func:`split`, by the replacement of the tensor."""
    if isinstance(value, list | tuple):
        items: Iterable[Plain] = value
    elif not isinstance(value, dict):
        return {}
    elif value.get(MARK) == "tensor":
        return {value["v"]: tuple(value[ORDER])} if ORDER in value else {}
    else:
        items = value.values()
    return {name: order for item in items for name, order in orders_in(item).items()}


def join(value: Plain, fetch: Fetch, path: str = "values") -> Any:
    """Return the original tree, with its tensors, from the result of :func:`split`.

    Args:
        fetch: called with each value that the function ``leaf`` of :func:`split` put in place of a tensor; returns the
            tensor.
        path: key path of ``value``, for errors.

    Raises:
        CheckpointInvalid: ``value`` was not made by :func:`split`.
    """
    if isinstance(value, list | tuple):
        items = [join(item, fetch, path) for item in value]
        return items if isinstance(value, list) else tuple(items)
    if not isinstance(value, dict):
        return value
    if MARK not in value:
        made = {key: join(item, fetch, f"{path}.{key}") for key, item in value.items()}
        return Counter(made) if isinstance(value, Counter) else made
    try:
        return _join_marked(value, fetch, path)
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointInvalid(f"{path}: damaged value ({type(error).__name__}: {error})") from error


def _join_marked(value: dict[str, Plain], fetch: Fetch, path: str) -> Any:
    mark, inner = value[MARK], value["v"]
    if mark == "tensor":
        return fetch(inner)
    if mark == "scalar":
        dtype = np.dtype(value["dtype"])
        # An empty text has no bytes.
        return np.frombuffer(inner, dtype)[0] if dtype.itemsize else dtype.type()
    if mark == "defaultdict":
        return defaultdict(FACTORIES[value["of"]], join(inner, fetch, path))
    items = [join(item, fetch, path) for item in inner]
    if mark == "deque":
        return deque(items, maxlen=value["max"])
    return {"set": set, "frozenset": frozenset}[mark](items)
