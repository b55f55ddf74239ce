"""The present values of variables of the script, as plain values that can be compared and saved.

A number, a bool or a short text stands for itself. An array, a tensor on the CPU, a container, a generator and values
of some types of the standard library (``Decimal``, ``timedelta``, an ``Enum``, bytes) become a text; different contents
give different texts. Of an iterator over a list or a range, the text has the number of items that are left. Values of
other types are left out.
"""

from __future__ import annotations

import array
import datetime
import decimal
import fractions
import itertools
import zlib
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from enum import Enum
from types import GeneratorType
from typing import Any

import numpy as np

from holdfast.core.worker.vote import STEP_MODULUS
from holdfast.frameworks.common.optional_abilities import DescribesUpdates
from holdfast.runtime.worker.script_frames import as_written, position_of, values_of
from holdfast.session.variables.deciding_variables import VARIABLES_MAX
from holdfast.session.variables.growing_tables import in_message
from holdfast.session.variables.unassigned_variables import NotAssigned
from holdfast.session.variables.variable_history import NUMBER, ZEROS, Names, PlainValue

TEXT_LENGTH_MAX = 200
TEXT_LENGTH_SHOWN = 60
BYTES_MAX = 1 << 20
LENGTH_MAX = 1000
DEPTH_MAX = 3
CONTAINERS = (list, tuple, dict, deque, set, frozenset)
_SIMPLE = (
    *(complex, bytes, bytearray, memoryview, array.array, range, Enum, itertools.count),
    *(decimal.Decimal, fractions.Fraction, datetime.date, datetime.time, datetime.timedelta),
)
"""Types whose values are compared by a text of their content."""
GENERATOR = "a generator "
"""The begin of the text for a generator, or for the iterator of a loader."""


def identified(*parts: bytes) -> int:
    """Return a number from 1 to STEP_MODULUS - 1 that identifies ``parts``."""
    found = 0
    for part in parts:
        found = zlib.crc32(part, found)
    return found % (STEP_MODULUS - 1) + 1


def identified_values(values: Mapping[str, PlainValue]) -> int:
    """Return a number from 1 to STEP_MODULUS - 1 that identifies ``values``, by name; 0 if there are none."""
    found = [(name, as_number(value)) for name, value in sorted(values.items())]
    return identified(repr(found).encode()) if found else 0


def as_number(value: PlainValue) -> PlainValue:
    """Return an equal value that is a whole number if there is one: ``0`` for ``0.0`` and ``False``."""
    return int(value) if isinstance(value, bool | float) and value == value // 1 else value


def present_values(names: Names) -> dict[str, object]:
    """Return the present values of the variables, each from the stack frame at its place."""
    found: dict[str, object] = {}
    for place in {place for place, _ in names.values()}:
        found.update(values_of([name for name, (own, _) in names.items() if own == place], place))
    return found


def plain_values(values: Mapping[str, object], source: DescribesUpdates | None) -> dict[str, PlainValue]:
    """Return the bools, numbers and short strings in ``values``, and a text for each generator, array and container.

    Of a container with objects, the text is the number of items. Values of other types are left out, because they may
    be state of the session.

    Args:
        source: the adapter, which reads the contents of tensors; if None, tensors are left out.
    """
    found: dict[str, PlainValue] = {}
    for name, value in values.items():
        if isinstance(value, np.generic):
            value = value.item()
        if isinstance(value, bool) or (isinstance(value, str) and len(value) <= TEXT_LENGTH_MAX):
            found[name] = value
        elif isinstance(value, int | float):
            found[name] = int(value) if isinstance(value, int) else float(value)  # no subclass of NumPy
        elif value is None:
            found[name] = "None"
        elif isinstance(value, GeneratorType):
            found[name] = position_of(value)[:TEXT_LENGTH_MAX]
        elif _is_small(value):
            found[name] = _as_text(value)
        elif isinstance(value, _SIMPLE):
            found[name] = _simple_as_text(value)
        elif isinstance(value, CONTAINERS):  # of objects, such as a pool of earlier images, or a long one
            found[name] = f"{len(value)} items"
        elif isinstance(value, NotAssigned):
            found[name] = "no value"  # only an earlier block assigns it, so a replacement has no value
        elif isinstance(value, Iterator) and (left := _items_left(value)) is not None:
            found[name] = f"an iterator with {left} items left"
        elif source is not None and (drawn := source.batches_drawn(value)) is not None:
            found[name] = f"{GENERATOR}of batches, at batch {drawn}"
        elif source is not None and (content := source.content_of(value, BYTES_MAX)) is not None:
            found[name] = f"a tensor {_content_as_text(content)}"
    return found


def _is_small(value: object) -> bool:
    """Return whether ``value`` is an array, or a container of numbers and strings, small enough for each step."""
    if type(value) is np.ndarray:
        return value.dtype.kind in "biufc" and value.nbytes <= BYTES_MAX
    return isinstance(value, CONTAINERS) and 0 <= _count(value, DEPTH_MAX) <= LENGTH_MAX


def _count(value: object, depth: int) -> int:
    """Return the number of items in nested containers; -1 if there are too many, or if one is not a number or string.

    Args:
        depth: largest number of containers around an item.
    """
    if value is None or isinstance(value, (bool, int, float, str, np.generic, *_SIMPLE)):
        return 1
    if not isinstance(value, CONTAINERS) or not depth or len(value) > LENGTH_MAX:
        return -1
    total = 0
    for item in (*value, *value.values()) if isinstance(value, dict) else value:
        count = _count(item, depth - 1)
        if count < 0 or (total := total + count) > LENGTH_MAX:
            return -1
    return total


def _as_text(value: Any) -> str:
    """Return a text for an array or container. Different contents give different texts."""
    if isinstance(value, np.ndarray):
        return f"an array {value.shape} {_content_as_text(value.tobytes())}"
    return _shortened(repr(_without_kinds(value)), f"{len(value)} values")


def _without_kinds(value: Any) -> Any:
    """Return a container as dicts, lists and tuples of plain items, without subclasses and NumPy numbers."""
    if isinstance(value, dict):
        return {_without_kinds(key): _without_kinds(item) for key, item in value.items()}
    if isinstance(value, CONTAINERS):
        items = [_without_kinds(item) for item in value]
        if isinstance(value, set | frozenset):  # its order is of this process
            return sorted(items, key=repr)
        return tuple(items) if isinstance(value, tuple) else items
    if isinstance(value, _SIMPLE):
        return _simple_as_text(value)
    return value.item() if isinstance(value, np.generic) else value


def _simple_as_text(value: Any) -> str:
    """Return a text for a value of one of the types in ``_SIMPLE``."""
    text = f"{type(value).__name__} {value.tobytes().hex()}" if isinstance(value, memoryview) else repr(value)
    return _shortened(text, f"{text[:20]}...")


def _shortened(text: str, begin: str) -> str:
    """Return ``text`` if it is short, otherwise ``begin`` with a checksum of ``text``."""
    return (
        text if len(text) <= TEXT_LENGTH_SHOWN else f"{begin} with checksum {zlib.crc32(text.encode()):08x}"
    )


def _items_left(value: Iterator[Any]) -> int | None:
    """Return the number of items that an iterator will yield; None if it does not know that."""
    hint = getattr(type(value), "__length_hint__", None)
    found = None if hint is None or type(value).__module__ != "builtins" else hint(value)
    return found if isinstance(found, int) else None


def _content_as_text(content: bytes) -> str:
    return f"with checksum {zlib.crc32(content):08x}" if content.strip(b"\0") else ZEROS


def shown(values: Mapping[str, PlainValue], names: Iterable[str] | None = None) -> str:
    """Return ``values`` as text (``count = 3, best = 0.5``), at most ``VARIABLES_MAX`` of them.

    Args:
        values: the values of variables.
        names: the variables to show; None means all.
    """
    chosen = list(values if names is None else names)[:VARIABLES_MAX]
    return ", ".join(f"{as_written(name)} = {_shown(values[name])}" for name in chosen)


def _shown(value: PlainValue) -> str:
    is_number = isinstance(value, str) and value.startswith(NUMBER)
    return str(value).removeprefix(NUMBER) if is_number else repr(in_message(value))
