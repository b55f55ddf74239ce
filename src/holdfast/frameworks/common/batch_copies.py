"""Copies of a batch's containers. A block that changes a container of one copy does not change the next copy.

Theory. A batch is a tree. Its inner nodes are containers: dict, list, tuple, named tuple, dataclass, any mutable
mapping, subclasses of these, and small objects that consist of their attributes (DETR's ``NestedTensor``, the
``Instances`` of detectron2). Every other object is a leaf. :func:`rebuilt` makes the containers again and asks the
caller for the object that replaces each leaf. A container in which nothing can change is not copied. The *place* of a
leaf is its path: its index in each container from the root to the leaf.

Invariants:
1. The copy has the types of the original, and the attributes that its containers have beside their items.
2. A leaf has the same place in every batch of the same structure.
"""

from __future__ import annotations

import copy
import enum
import functools
from collections import deque
from collections.abc import Callable, Collection, MutableMapping
from dataclasses import fields, is_dataclass
from datetime import date, time, timedelta
from pathlib import PurePath
from typing import Any

import numpy as np

Place = tuple[int, ...]
OBJECT_VALUES_MAX = 1000
"""Largest number of values in the attributes of an object that is copied. A larger one holds data, not one batch."""

_CONSTANT = (
    type(None), bool, int, float, complex, str, bytes, range, slice, frozenset, type, enum.Enum, np.generic,
    np.dtype, date, time, timedelta, PurePath,
)  # fmt: skip


def is_constant(leaf: object) -> bool:
    """Return True if the object is of a type whose values cannot change."""
    return isinstance(leaf, _CONSTANT)


def rebuilt(value: Any, leaf: Callable[[Any, Place], Any], place: Place = ()) -> Any:
    """Return a copy of ``value`` with new containers. A container in which nothing can change is not copied.

    Args:
        leaf: called for every object that is not a container, with the object and its place (the path to the object
            in the batch). It returns the object that replaces this one in the copy.
        place: indices that lead from the root of the batch to ``value``.
    """
    if is_constant(value):
        return value
    made: Any
    if isinstance(value, MutableMapping):
        made = copy.copy(value)
        for number, (key, item) in enumerate(list(value.items())):
            _put(made, key, item, rebuilt(item, leaf, (*place, number)))
        return made
    if isinstance(value, list | deque):
        made = copy.copy(value)
        for number, item in enumerate(list(value)):
            _put(made, number, item, rebuilt(item, leaf, (*place, number)))
        return made
    if isinstance(value, set | bytearray):
        return copy.copy(value)
    if isinstance(value, tuple):
        return _tuple(value, leaf, place)
    if is_dataclass(value) and not isinstance(value, type):
        made = copy.copy(value)
        for number, field in enumerate(fields(value)):
            if hasattr(value, field.name):
                item = rebuilt(getattr(value, field.name), leaf, (*place, number))
                object.__setattr__(made, field.name, item)
        return made
    if _attributes(value) and _is_small(value):
        made = object.__new__(type(value))
        for number, (name, item) in enumerate(_attributes(value).items()):
            vars(made)[name] = rebuilt(item, leaf, (*place, number))
        return made
    return leaf(value, place)


class _Plain:
    """A class whose objects consist of their attributes."""


@functools.cache
def _consists_of_attributes(kind: type) -> bool:
    """Return whether an object of this class is copied by its attributes alone, without code of the class.

    The result is False for a class that defines how it is copied, for a class in C, and for a class with slots: their
    objects have data outside of their attributes. ``__getattr__`` and ``__setattr__`` are not called when the
    attributes are read and written in ``__dict__``.
    """
    own = ("__copy__", "__deepcopy__", "__setstate__", "__del__", "__next__")
    inherited = ("__new__", "__reduce__", "__reduce_ex__", "__getstate__", "__getattribute__")
    return (
        kind.__basicsize__ == _Plain.__basicsize__
        and kind.__dictoffset__ == _Plain.__dictoffset__
        and not any(hasattr(kind, name) for name in own)
        and all(getattr(kind, name) is getattr(object, name) for name in inherited)
    )


def _attributes(value: Any) -> dict[str, Any]:
    """Return the attributes of an object that consists of nothing else; empty for other objects."""
    kind: Any = type(value)
    return vars(value) if _consists_of_attributes(kind) else {}


def _is_small(value: object) -> bool:
    """Return whether an object holds few values, and each of them in one place only."""
    seen: set[int] = set()
    ahead: list[Any] = [value]
    while ahead:
        item = ahead.pop()
        if is_constant(item):
            continue
        inner = _items_of(item)
        if id(item) in seen or len(seen) + len(ahead) + len(inner) > OBJECT_VALUES_MAX:
            return False
        seen.add(id(item))
        ahead.extend(inner)
    return True


def _items_of(value: Any) -> Collection[Any]:
    if isinstance(value, MutableMapping):
        return value.values()
    if isinstance(value, list | deque | tuple):
        return value
    return _attributes(value).values()


def _put(made: Any, key: Any, old: Any, new: Any) -> None:
    if new is not old:
        made[key] = new


def _tuple(value: tuple[Any, ...], leaf: Callable[[Any, Place], Any], place: Place) -> Any:
    items = [rebuilt(item, leaf, (*place, number)) for number, item in enumerate(value)]
    if all(new is old for new, old in zip(items, value, strict=True)):
        return value
    make = getattr(type(value), "_make", None)  # a method of named tuples
    return type(value)(items) if make is None else make(items)
