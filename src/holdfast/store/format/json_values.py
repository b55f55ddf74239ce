"""Python values as JSON without loss: a decoded value is equal and of the same type, or the encoder refuses the value.

Theory. Schedulers, scalers, parameter groups, counters and data positions are small trees of plain values. JSON can
express most of these values. The others become an object with one key (a *tag*) that starts with ``$``: tuples, bytes,
non-finite floats, integers beyond 64 bits, dicts with other than text keys, ``collections.Counter``. No type name is
ever looked up, so reading executes nothing.

Invariants:
1. ``decode_values(encode_values(x))`` equals ``x`` with the same types. Exceptions: OrderedDict becomes dict, bytearray
   becomes bytes, and a subclass of a number type or of str becomes its base type.
2. A value that cannot be encoded raises :class:`StateError` with its position, e.g. ``values['scheduler']['fn']``.
"""

from __future__ import annotations

import base64
import binascii
import json
import math
from collections import Counter, OrderedDict
from collections.abc import Iterable
from enum import Enum
from itertools import chain
from typing import Any, NoReturn

import msgspec

from holdfast.errors import CheckpointInvalid, StateError

VALUES_SIZE_BYTES_MAX = 16 * 1024 * 1024
DEPTH_MAX = 64
INT_DIGITS_MAX = 4000
"""Largest number of characters of an integer beyond 64 bits, sign included.

Longer text takes long to parse, and Python refuses very long text.
"""


def encode_values(value: object, where: str = "values") -> bytes:
    """Return compact JSON of a tree of plain values. In errors, the root of the tree has the name ``where``.

    Raises:
        StateError: a value cannot be saved (the error names it), or the JSON has more than ``VALUES_SIZE_BYTES_MAX``
            bytes.
    """
    data = msgspec.json.encode(_tagged(value, where, 0))
    if len(data) > VALUES_SIZE_BYTES_MAX:
        raise StateError(
            f"{where} takes {len(data)} bytes as JSON; the limit is {VALUES_SIZE_BYTES_MAX}",
            hint="keep large state in tensors",
        )
    return data


def decode_values(data: bytes, where: str = "values") -> object:
    """Return the tree of plain values that :func:`encode_values` encoded. In errors, its root has the name ``where``.

    Raises:
        CheckpointInvalid: ``data`` is not the output of :func:`encode_values`; the error names the broken rule.
    """
    if len(data) > VALUES_SIZE_BYTES_MAX:
        raise CheckpointInvalid(f"{where}: {len(data)} bytes of JSON; the limit is {VALUES_SIZE_BYTES_MAX}")
    try:
        value = json.loads(data, object_pairs_hook=_untagged)
    except (ValueError, TypeError, RecursionError) as error:
        raise CheckpointInvalid(f"{where}: {error}") from error
    # A value with few brackets cannot be deep, and most values have few.
    if data.count(b"[") + data.count(b"{") > DEPTH_MAX and _is_deep(value):
        raise CheckpointInvalid(f"{where}: nested deeper than {DEPTH_MAX} levels")
    return value


def decode_mapping(data: bytes, where: str = "values") -> dict[str, Any]:
    """Return the dict that :func:`encode_values` encoded. In errors, the dict has the name ``where``.

    Raises:
        CheckpointInvalid: ``data`` is not the output of :func:`encode_values` for a dict.
    """
    value = decode_values(data, where)
    if not isinstance(value, dict):
        raise CheckpointInvalid(f"{where}: not an object")
    return value


def _tagged(value: object, where: str, depth: int) -> object:
    """Return ``value`` as JSON types. A value that JSON lacks becomes an object with one ``$`` key.

    ``where`` is the position of the value, for errors, and ``depth`` its nesting level.
    """
    if depth > DEPTH_MAX:
        raise StateError(f"{where} is nested deeper than {DEPTH_MAX} levels (a cycle?)")
    if isinstance(value, Enum):
        _refuse(value, where)
    if value is None or isinstance(value, bool | str):
        return _plain_text(value, where) if isinstance(value, str) else value
    if isinstance(value, int):
        return int(value) if -(2**63) <= value < 2**63 else {"$int": _digits(int(value), where)}
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"$float": str(float(value))}
    if isinstance(value, bytes | bytearray):
        return {"$bytes": base64.b64encode(value).decode()}
    if type(value) is list:
        return [_tagged(v, f"{where}[{i}]", depth + 1) for i, v in enumerate(value)]
    if type(value) is tuple:
        return {"$tuple": [_tagged(v, f"{where}[{i}]", depth + 1) for i, v in enumerate(value)]}
    if type(value) in (dict, OrderedDict, Counter):
        assert isinstance(value, dict)
        tag = "$counter" if type(value) is Counter else "$map"
        if tag == "$map" and all(type(k) is str and not k.startswith("$") for k in value):
            return {
                _plain_text(k, f"a key of {where}"): _tagged(v, f"{where}[{k!r}]", depth + 1)
                for k, v in value.items()
            }
        return {
            tag: [
                [_tagged(k, f"key {k!r} of {where}", depth + 1), _tagged(v, f"{where}[{k!r}]", depth + 1)]
                for k, v in value.items()
            ]
        }
    _refuse(value, where)


def _digits(value: int, where: str) -> str:
    # The test of the bit length excludes numbers that Python refuses to convert to text.
    if value.bit_length() > INT_DIGITS_MAX * 10 // 3 or len(text := str(value)) > INT_DIGITS_MAX:
        raise StateError(
            f"{where} is an integer of more than {INT_DIGITS_MAX} digits",
            hint="keep it as bytes: x.to_bytes(length, 'little', signed=True)",
        )
    return text


def _plain_text(value: str, where: str) -> str:
    try:
        value.encode()
    except UnicodeEncodeError:
        raise StateError(f"{where} holds text that is not valid Unicode") from None
    return str(value)


def _refuse(value: object, where: str) -> NoReturn:
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    raise StateError(
        f"{where} is a {kind}: it cannot be saved without executing code when it is loaded",
        hint="offer it as a tensor or as plain values (numbers, text, bytes, lists, tuples, dicts)",
    )


def _untagged(pairs: list[tuple[str, object]]) -> object:
    """Return the Python value of one JSON object, plain or with one ``$`` key (``object_pairs_hook`` of ``json``).

    Raises:
        ValueError: duplicate keys, an unknown ``$`` key, or a wrong content of a ``$`` key.
    """
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("duplicate key")
    if len(pairs) != 1 or not pairs[0][0].startswith("$"):
        if any(key.startswith("$") for key in result):
            raise ValueError("a tag among other keys")
        return result
    tag, content = pairs[0]
    if tag in ("$int", "$float", "$bytes"):
        return _scalar(tag, content)
    if not isinstance(content, list):
        raise ValueError(f"{tag} without a list")
    if tag == "$tuple":
        return tuple(content)
    if tag in ("$map", "$counter"):
        if any(not isinstance(pair, list) or len(pair) != 2 for pair in content):
            raise ValueError(f"{tag} is not a list of pairs")
        items = dict(content)
        if len(items) != len(content):
            raise ValueError("duplicate key")
        return Counter(items) if tag == "$counter" else items
    raise ValueError(f"unknown tag {tag!r}")


def _is_deep(value: object) -> bool:
    """Return True if ``value`` is nested deeper than ``DEPTH_MAX`` levels.

    The function does not recurse, because decoded values may be very deep.
    """
    level: list[object] = [value]
    for _ in range(DEPTH_MAX + 1):
        level = [inner for outer in level for inner in _inside(outer)]
        if not level:
            return False
    return True


def _inside(value: object) -> Iterable[object]:
    if isinstance(value, dict):
        return chain(value.keys(), value.values())
    return value if isinstance(value, list | tuple) else ()


def _scalar(tag: str, content: object) -> object:
    if not isinstance(content, str):
        raise ValueError(f"{tag} without a text")
    if tag == "$int":
        if len(content) > INT_DIGITS_MAX:
            raise ValueError(f"$int of more than {INT_DIGITS_MAX} digits")
        return int(content)
    if tag == "$float":
        if content not in ("nan", "inf", "-inf"):
            raise ValueError("$float is none of nan, inf, -inf")
        return float(content)
    try:
        return base64.b64decode(content, validate=True)
    except binascii.Error as error:
        raise ValueError(f"$bytes: {error}") from error
