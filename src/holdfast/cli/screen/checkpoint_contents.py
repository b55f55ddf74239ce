"""The contents of a checkpoint for a reader: plain values by dotted names, and totals of the tensors."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from math import prod

import msgspec

from holdfast.store.layouts.layout import TensorEntry
from holdfast.text import plural

TEXT_MAX = 60  # characters of a value
ITEMS_MAX = 8  # items of a list that is shown in one line
LEVELS_MAX = 32
_BY_PARAMETER = frozenset({"state", "members", "shared", "added"})
"""Keys of an optimizer's state whose values have one entry per parameter. These values are not shown."""


class Total(msgspec.Struct):
    """The totals of all tensors of one dtype: number of tensors, number of elements, and bytes."""

    tensors: int = 0
    elements: int = 0
    size_bytes: int = 0


def totals(tensors: Iterable[TensorEntry]) -> dict[str, Total]:
    """Return the totals of ``tensors`` by dtype, the dtype with most bytes first."""
    found: dict[str, Total] = {}
    for tensor in tensors:
        total = found.setdefault(tensor.dtype, Total())
        total.tensors += 1
        total.elements += prod(tensor.shape)
        total.size_bytes += tensor.size_bytes
    return dict(sorted(found.items(), key=lambda item: -item[1].size_bytes))


def readable(values: Mapping[str, object]) -> dict[str, str]:
    """Return the plain values of a checkpoint as text, by dotted name (``optimizers.default.groups.0.lr``).

    Empty values, None, tensors, and the values that an optimizer has for each parameter are left out.
    """
    return {name: text for name, text in _walk(values, "", LEVELS_MAX) if text}


def _walk(value: object, name: str, levels: int) -> Iterator[tuple[str, str]]:
    if isinstance(value, Mapping) and levels:
        if set(value) == {"@", "v"}:  # a tensor, or another encoded object
            return
        by_parameter = "groups" in value and "state" in value
        for key, item in value.items():
            if not (by_parameter and key in _BY_PARAMETER):
                yield from _walk(item, f"{name}.{key}" if name else str(key), levels - 1)
    elif (
        isinstance(value, list | tuple)
        and any(isinstance(item, Mapping | list | tuple) for item in value)
        and levels
    ):
        for number, item in enumerate(value[:ITEMS_MAX]):
            yield from _walk(item, f"{name}.{number}", levels - 1)
        if len(value) > ITEMS_MAX:
            yield name, f"... {plural(len(value), 'item')} in all"
    else:
        yield name, _text(value)


def _text(value: object) -> str:
    if value is None or value == [] or value == () or value == {}:
        return ""
    if isinstance(value, bytes):
        return plural(len(value), "byte")
    if isinstance(value, list | tuple) and len(value) > ITEMS_MAX:
        return plural(len(value), "item")
    text = str(value)
    return text if len(text) <= TEXT_MAX else f"{text[: TEXT_MAX - 3]}..."
