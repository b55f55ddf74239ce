"""Copies of the plain values in an object's attributes, which can be encoded and later put back into an object.

Theory. Scripts count in objects of their own: an ``AverageMeter``, a dict of sums, a deque of the last losses. Their
values are None, numbers and strings, in lists, deques, tuples, dicts, and objects with such attributes. A copy of the
values contains no class and no code, so it can be sent and saved. The values are put back into a live object: its
containers and inner objects stay the same Python objects. A ``defaultdict`` makes missing entries by its factory.

A copy consists of dicts, lists and single values. A tuple in the copy marks other kinds of content:
``("object", attributes)``, ``("tuple", items)``, or ``("scalar", (dtype, number))`` for a NumPy number (learning rate
schedules hold such numbers).

Invariants:
1. ``put_back(live, plain_copy(live))`` changes nothing.
2. An error names the path of a value that is not plain. Constant attributes are left out: functions, classes, modules,
   members of enumerations, paths, loggers, devices and dtypes.
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

from holdfast.runtime.worker.script_attributes import has_static, instance_of

VALUES_MAX = 20_000
"""Largest number of values in one copy. An object with more values holds data, not counters."""
DEPTH_MAX = 32
_SINGLE = (bool, int, float, str)
_SCALARS = {np.dtype(code).name: np.dtype(code).type for code in "?bBhHiIqQefd"}
_CONSTANT = (
    *(type, types.ModuleType, types.FunctionType, types.MethodType, types.BuiltinFunctionType),
    *(functools.partial, Enum, PurePath, logging.Logger),
)
_CONSTANT_OF_TORCH = ("device", "dtype")


class NotPlainError(Exception):
    """The error for a value that has no plain copy. Its text names the path and the type of the value."""


def plain_copy(value: Any, *, objects: bool) -> Any:
    """Return a copy of ``value`` that consists of dicts, lists and single values (see the module).

    Args:
        value: the value to copy.
        objects: also accept tuples, NumPy numbers, dicts with int keys, and objects with attributes.

    Raises:
        NotPlainError: a value is not plain; the error names the first one by its path from ``value``.

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


def parts_of(value: object) -> list[object]:
    """Return ``value`` and the containers and objects in it, of which :func:`plain_copy` copies the content.

    No code of the script runs. Tuples are left out, because equal tuples may be one object.

    Example:
        >>> parts_of({"losses": [0.5]})
        [{'losses': [0.5]}, [0.5]]
    """
    found: dict[int, object] = {}
    waiting = deque([value])
    while waiting and len(found) < VALUES_MAX:
        part = waiting.popleft()
        if (
            isinstance(part, (*_SINGLE, bytes, np.generic, type(None)))
            or _is_constant(part)
            or id(part) in found
        ):
            continue
        if not isinstance(part, tuple):
            found[id(part)] = part
        inner = part if isinstance(part, list | tuple | deque) else instance_of(part).values()
        waiting.extend(dict.values(part) if isinstance(part, dict) else inner)
    return list(found.values())


def _is_constant(value: Any) -> bool:
    of_torch = type(value).__module__ == "torch" and type(value).__name__ in _CONSTANT_OF_TORCH
    return isinstance(value, _CONSTANT) or of_torch


def _has_values_elsewhere(value: Any) -> bool:
    """Return whether an object has data outside of its attributes: a tensor, an array, or a subclass of a container."""
    kinds = (list, dict, tuple, set, frozenset, bytes, bytearray, int, float, str, deque)
    return isinstance(value, kinds) or has_static(value, "__array__") or has_static(value, "__next__")


def put_back(live: Any, kept: Any, path: str = "") -> Any:
    """Put the values of the copy ``kept`` into ``live``. Return ``live``, or a new value if ``live`` cannot take them.

    Args:
        live: the object to fill. Its containers and inner objects are reused.
        kept: a result of :func:`plain_copy`.
        path: path of ``live`` from the outermost object, for errors.

    Raises:
        NotPlainError: ``kept`` has an object at a path where ``live`` has none, and none can be made.
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
    """Write the copied values ``kept`` to the dict ``into``, which may be the ``__dict__`` of an object.

    Args:
        factory: the factory of a ``defaultdict``, which makes a missing container or object; None if there is none.
        place: returns the path of a key, for errors.
        all_of_it: remove all other keys from ``into``.
    """
    before = dict(into)
    if all_of_it:
        into.clear()
    for key, item in kept.items():
        live = before.get(key)
        if live is None and factory is not None and isinstance(item, tuple | dict | list):
            live = factory()
        into[key] = put_back(live, item, place(key))
