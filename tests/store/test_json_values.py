"""Plain values are restored exactly. All other values are refused, with their key path."""

from __future__ import annotations

import math
from collections import Counter, OrderedDict, defaultdict
from enum import IntEnum

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.errors import CheckpointInvalid, StateError
from holdfast.store.format.json_values import decode_values, encode_values

LEAVES = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary(max_size=20)
)
KEYS = st.text() | st.integers() | st.tuples(st.integers(), st.text())
TREES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(KEYS, inner, max_size=4)
        | st.dictionaries(st.text(), st.integers(), max_size=4).map(Counter)
    ),
    max_leaves=20,
)


def typed(value: object) -> object:
    """Return a form in which 1, 1.0 and True, lists and tuples differ, and dict order counts."""
    if isinstance(value, dict):
        return (type(value).__name__, [(typed(k), typed(v)) for k, v in value.items()])
    if isinstance(value, list | tuple):
        return (type(value).__name__, [typed(v) for v in value])
    return (type(value).__name__, repr(value))


@given(TREES)
def test_round_trip_keeps_values_types_and_order(value: object) -> None:
    assert typed(decode_values(encode_values(value))) == typed(value)


def test_what_json_cannot_say() -> None:
    value = {"lr": float("nan"), "best": -math.inf, "$odd": 1, "big": 2**200, "tail": OrderedDict(a=1)}
    back = decode_values(encode_values(value))
    assert isinstance(back, dict)
    assert (
        math.isnan(back["lr"]) and back["best"] == -math.inf and back["$odd"] == 1 and back["big"] == 2**200
    )
    assert back["tail"] == {"a": 1}
    assert decode_values(encode_values(np.float64(0.1))) == 0.1


class Kind(IntEnum):
    ONE = 1


@pytest.mark.parametrize(
    ("value", "place"),
    [
        ({"a": [1, {2, 3}]}, r"values\['a'\]\[1\] is a builtins.set"),
        ({"f": lambda: 0}, r"values\['f'\] is a builtins.function"),
        ({"k": Kind.ONE}, r"values\['k'\] is a .*Kind"),
        ({"d": defaultdict(list)}, r"values\['d'\] is a collections.defaultdict"),
        ({"n": np.float32(1)}, r"values\['n'\] is a numpy.float32"),
        ({"t": "\ud800"}, r"values\['t'\] holds text that is not valid Unicode"),
    ],
)
def test_anything_else_is_refused_by_its_place(value: object, place: str) -> None:
    with pytest.raises(StateError, match=place):
        encode_values(value)


def test_a_cycle_is_refused() -> None:
    value: list[object] = []
    value.append(value)
    with pytest.raises(StateError, match="nested deeper than 64"):
        encode_values(value)


@pytest.mark.parametrize(
    "data",
    [
        b"", b"{", b'{"a":1,"a":2}', b'{"$eval":"1"}', b'{"$tuple":1}', b'{"$tuple":[1],"a":2}', b'{"$int":"x"}',
        b'{"$int":7}', b'{"$float":"1.5"}', b'{"$bytes":"?"}', b'{"$map":[[1]]}', b'{"$map":[[1,2],[1,3]]}',
        b'{"$map":[[[1],2]]}', b'{"$int":"' + b"9" * 5000 + b'"}', b"[" * 100_000, b"\xff", b" " * (2**24 + 1),
    ],
)  # fmt: skip
def test_hostile_values_are_refused(data: bytes) -> None:
    with pytest.raises(CheckpointInvalid, match="values"):
        decode_values(data)


@pytest.mark.parametrize("value", [10**3999 - 1, -(10**3998), 10**4000 - 1], ids=range(3))
def test_long_integers_come_back(value: int) -> None:
    assert decode_values(encode_values({"n": value})) == {"n": value}


@pytest.mark.parametrize("value", [10**4000, -(10**3999), 10**4299, 10**4500, 10**9999], ids=range(5))
def test_longer_integers_are_refused_when_they_are_saved(value: int) -> None:
    with pytest.raises(StateError, match=r"values\['n'\] is an integer of more than 4000 digits"):
        encode_values({"n": value})


@pytest.mark.parametrize("opened", [b"[", b'{"a":', b'{"$tuple":[', b'{"$map":[[1,'])
def test_the_depth_that_is_read_is_the_depth_that_is_written(opened: bytes) -> None:
    """Regression: deeper values were read, and their assembly ended in a RecursionError."""
    shut = opened.translate(bytes.maketrans(b"[{", b"]}"), b'"a:$tuplemap1,')[::-1]
    for depth in (63, 64):
        value = decode_values(opened * depth + b"0" + shut * depth)
        assert decode_values(encode_values(value)) == value
    for depth in (65, 66, 300, 600):
        with pytest.raises(CheckpointInvalid, match=r"values: .*(deeper than 64|recursion)"):
            decode_values(opened * depth + b"0" + shut * depth)
    assert decode_values(b"[" + b"[]," * 1000 + b"[]]") == [[]] * 1001
