"""Plain values in the attributes of an object, as a copy that can be encoded and put back into the same containers.

Theory. Scripts count in objects of their own: an ``AverageMeter``, a dict of sums, a deque of the last losses. Their
values are None, numbers and texts, in lists, deques, tuples, dicts, and objects with such attributes. A copy of the
values has no class and no code in it, so it can be sent and saved. It is put back into the live object: containers and
objects stay the same ones, and a ``defaultdict`` makes the entries that it lacks.

A copy consists of dicts, lists and single values. A tuple in it is marked content: ``("object", attributes)``,
``("tuple", items)`` or ``("scalar", (dtype, number))`` for a number of NumPy, as schedules hold them.

Invariants:
1. ``put_back(live, plain_copy(live))`` changes nothing.
2. A value that is not plain is named by its path. Attributes that do not count are left out: functions, classes,
   modules, members of enumerations, paths, loggers, devices and dtypes.
"""

from __future__ import annotations

import functools
import logging
import types
from collections import deque
from collections.abc import Callable, Iterator, MutableMapping
from enum import Enum
from itertools import count
from pathlib import PurePath
from typing import Any

import numpy as np

VALUES_MAX = 20_000
"""The most values in one copy: more are data of the script."""
DEPTH_MAX = 32
_SINGLE = (bool, int, float, str)
_SCALARS = {np.dtype(code).name: np.dtype(code).type for code in "?bBhHiIqQefd"}
_CONSTANT = (
    *(type, types.ModuleType, types.FunctionType, types.MethodType, types.BuiltinFunctionType),
    *(functools.partial, Enum, PurePath, logging.Logger),
)
_CONSTANT_OF_TORCH = ("device", "dtype")


class NotPlainError(Exception):
    """A value is not made of plain values, or of too many. The text names its path and says what it is."""


def plain_copy(value: Any, *, objects: bool) -> Any:
    """Return a copy of ``value`` that consists of plain values.

    Args:
        objects: accept tuples, and objects with attributes.

    Raises:
        NotPlainError: names the first value that is not plain, as a path from ``value``.

    Example:
        >>> plain_copy({"loss": deque([0.5])}, objects=False)
        {'loss': [0.5]}
    """
    return _copied(value, "", 0, count(1), objects)


def _copied(value: Any, path: str, depth: int, number: Iterator[int], objects: bool) -> Any:
    if next(number) > VALUES_MAX or depth > DEPTH_MAX:
        raise NotPlainError(f"{path or 'it'} holds more than {VALUES_MAX} values, or refers to itself")
    if value is None or type(value) in _SINGLE:
        return value

    def inner(item: Any, place: str) -> Any:
        return _copied(item, f"{path}{place}", depth + 1, number, objects)

    if isinstance(value, list | deque):
        found = [inner(item, f"[{index}]") for index, item in enumerate(value)]
        if any(isinstance(item, tuple) and item[0] == "object" for item in found):
            raise NotPlainError(f"{path or 'it'} is a list of objects: a dict of them is put back")
        return found
    if isinstance(value, dict) and all(
        type(key) in (str, int) if objects else type(key) is str for key in value
    ):
        return {key: inner(item, f"[{key!r}]") for key, item in value.items()}
    if objects and isinstance(value, np.generic) and value.dtype.name in _SCALARS:
        return ("scalar", (value.dtype.name, value.item()))
    if objects and type(value) is tuple:
        return ("tuple", [inner(item, f"[{index}]") for index, item in enumerate(value)])
    own = getattr(value, "__dict__", None) if objects and type(value).__module__ != "builtins" else None
    if own is not None and not _has_values_elsewhere(value):
        kept = {key: item for key, item in own.items() if not _is_constant(item)}
        return ("object", {key: inner(item, f".{key}") for key, item in kept.items()})
    raise NotPlainError(f"{path or 'it'} is a {type(value).__name__}")


def _is_constant(value: Any) -> bool:
    of_torch = type(value).__module__ == "torch" and type(value).__name__ in _CONSTANT_OF_TORCH
    return isinstance(value, _CONSTANT) or of_torch


def _has_values_elsewhere(value: Any) -> bool:
    """Return whether an object holds values beside its attributes: a tensor, an array, a subclass of a container."""
    kinds = (list, dict, tuple, set, frozenset, bytes, bytearray, int, float, str, deque)
    return isinstance(value, kinds) or hasattr(value, "__array__") or hasattr(value, "__next__")


def put_back(live: Any, kept: Any, path: str = "") -> Any:
    """Return the values of the copy ``kept``, in the containers and objects of ``live`` where it has them.

    Raises:
        NotPlainError: the copy has an object at a place where ``live`` has none, and cannot make one.
    """
    if isinstance(kept, tuple):
        kind, content = kept
        if kind == "scalar":
            return _SCALARS[content[0]](content[1])
        if kind == "tuple":
            return tuple(put_back(None, item, f"{path}[{index}]") for index, item in enumerate(content))
        if not hasattr(live, "__dict__"):
            raise NotPlainError(f"{path or 'it'} was an object, and is missing here")
        _fill(vars(live), content, None, lambda key: f"{path}.{key}", all_of_it=False)
        return live
    if isinstance(kept, dict):
        into = live if isinstance(live, dict) else {}
        _fill(
            into, kept, getattr(into, "default_factory", None), lambda key: f"{path}[{key!r}]", all_of_it=True
        )
        return into
    if isinstance(kept, list):
        listed = live if isinstance(live, list | deque) else []
        listed.clear()
        listed.extend(put_back(None, item, f"{path}[{index}]") for index, item in enumerate(kept))
        return listed
    return kept


def _fill(
    into: MutableMapping[Any, Any],
    kept: dict[Any, Any],
    factory: Callable[[], Any] | None,
    place: Callable[[Any], str],
    *,
    all_of_it: bool,
) -> None:
    """Put values into a dict or the attributes of an object; ``all_of_it``: it holds no other keys afterwards."""
    before = dict(into)
    if all_of_it:
        into.clear()
    for key, item in kept.items():
        live = before.get(key)
        if live is None and factory is not None and isinstance(item, tuple | dict | list):
            live = factory()
        into[key] = put_back(live, item, place(key))
