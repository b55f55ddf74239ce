"""State that is not a tensor, as JSON: what a checkpoint can hold and how it comes back.

Theory. A ``state_dict`` is a tree of containers with tensors and plain values at its leaves. Encoding walks it once:
tensors are handed to the caller with their key path and leave what the caller puts in their place, values become
JSON, containers that JSON does not know (tuples, counters, dictionaries with other keys than text, ...) get a tag.
Decoding is the exact inverse.
Nothing is ever pickled: an object that is none of these is refused by its key path and type.
"""

from __future__ import annotations

import base64
import math
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from holdfast.errors import CheckpointInvalid, StateError

Json = Any
Leaf = Callable[[Any, str], Json]
"""Called with each object and its key path: what stands for it when it is a tensor (text or JSON), else None."""
Fetch = Callable[[Json], Any]
"""Inverse of :data:`Leaf`."""

TAG = "$"
DEPTH_MAX = 64
_INT_LIMIT = 1 << 63


def no_leaf(value: Any, path: str) -> Json:
    """For values that hold no tensors."""
    return None


def encode(value: Any, path: str, leaf: Leaf = no_leaf, depth: int = 0) -> Json:
    """``value`` as JSON; ``path`` is its key path in errors and for ``leaf``.

    Raises:
        StateError: an object that cannot be saved, named by key path and type.
    """
    if depth > DEPTH_MAX:
        raise StateError(f"{path}: nested deeper than {DEPTH_MAX} levels (does it contain itself?)")
    stands_for = leaf(value, path)
    if stands_for is not None:
        return {TAG: "tensor", "v": stands_for}
    if value is None or type(value) in (bool, str):
        return value
    if type(value) is int:
        return value if -_INT_LIMIT <= value < _INT_LIMIT else {TAG: "int", "v": str(value)}
    if isinstance(value, float) and type(value) in (float, np.float64):
        return float(value) if math.isfinite(value) else {TAG: "float", "v": repr(float(value))}
    if isinstance(value, np.generic):
        return {TAG: "scalar", "dtype": value.dtype.str, "v": _text(value.tobytes())}
    if type(value) in (bytes, bytearray):
        return {TAG: "bytes", "v": _text(bytes(value))}
    return _encode_container(value, path, leaf, depth + 1)


def _encode_container(value: Any, path: str, leaf: Leaf, depth: int) -> Json:
    def items(values: Iterable[Any]) -> list[Json]:
        return [encode(item, f"{path}.{index}", leaf, depth) for index, item in enumerate(values)]

    def pairs(mapping: Mapping[Any, Any]) -> list[Json]:
        return [
            [encode(key, f"{path}.{key}", no_leaf, depth), encode(item, f"{path}.{key}", leaf, depth)]
            for key, item in mapping.items()
        ]

    kind = type(value)
    if kind is dict and all(type(key) is str for key in value) and TAG not in value:
        return {key: encode(item, f"{path}.{key}", leaf, depth) for key, item in value.items()}
    if kind is list:
        return items(value)
    # A tuple subclass with named fields would not come back as itself; torch.Size is a plain tuple to all uses.
    if isinstance(value, tuple) and (kind is tuple or kind.__name__ == "Size"):
        return {TAG: "tuple", "v": items(value)}
    if kind in _MAPPINGS.values():
        tag = next(name for name, known in _MAPPINGS.items() if known is kind)
        return {TAG: tag, "v": pairs(value)}
    if kind in (set, frozenset):
        return {TAG: kind.__name__, "v": items(sorted(value, key=repr))}
    if kind is deque:
        return {TAG: "deque", "max": value.maxlen, "v": items(value)}
    raise StateError(
        f"{path}: an object of type {kind.__module__}.{kind.__qualname__} cannot be saved",
        hint="offer tensors, numbers, text, lists and dictionaries, or give the object state_dict() and "
        "load_state_dict() that use only these",
    )


_MAPPINGS: dict[str, type] = {"dict": dict, "odict": OrderedDict, "counter": Counter}


def decode(value: Json, fetch: Fetch, path: str = "values") -> Any:
    """Inverse of :func:`encode`; ``fetch`` returns the tensor that a leaf stands for.

    Raises:
        CheckpointInvalid: not made by :func:`encode`.
    """
    if isinstance(value, list):
        return [decode(item, fetch, path) for item in value]
    if not isinstance(value, dict):
        return value
    if TAG not in value:
        return {key: decode(item, fetch, f"{path}.{key}") for key, item in value.items()}
    try:
        return _decode_tagged(value, fetch, path)
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointInvalid(f"{path}: damaged value ({type(error).__name__}: {error})") from error


def _decode_tagged(value: dict[str, Json], fetch: Fetch, path: str) -> Any:
    tag, inner = value[TAG], value["v"]
    if tag == "tensor":
        return fetch(inner)
    if tag == "int":
        return int(inner)
    if tag == "float":
        return float(inner)
    if tag == "bytes":
        return _bytes(inner)
    if tag == "scalar":
        return np.frombuffer(_bytes(inner), dtype=np.dtype(value["dtype"]))[0]
    if tag in _MAPPINGS:
        made = [(decode(key, fetch, path), decode(item, fetch, path)) for key, item in inner]
        return _MAPPINGS[tag](dict(made)) if tag == "counter" else _MAPPINGS[tag](made)
    items = [decode(item, fetch, path) for item in inner]
    if tag == "deque":
        return deque(items, maxlen=value["max"])
    return {"tuple": tuple, "set": set, "frozenset": frozenset}[tag](items)


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _bytes(text: str) -> bytes:
    return base64.b64decode(text, validate=True)
