"""Copies of the containers of a batch."""

from __future__ import annotations

from collections import OrderedDict, UserDict, defaultdict, deque
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest

from holdfast.frameworks.common.batch_copies import Place, rebuilt


class Pair(NamedTuple):
    x: Any
    y: Any


@dataclass(frozen=True, slots=True)
class Item:
    x: Any
    name: str


class Encoding(UserDict[str, Any]):
    """A batch in the form that tokenizers return."""

    def __init__(self, data: dict[str, Any], extra: str) -> None:
        super().__init__(data)
        self.extra = extra

    def __getattr__(self, item: str) -> Any:
        try:
            return self.data[item]
        except KeyError:
            raise AttributeError from None


class Nested:
    """A batch in the form of DETR: images of different sizes with a mask."""

    def __init__(self, tensors: Any, mask: Any) -> None:
        self.tensors, self.mask = tensors, mask

    def __repr__(self) -> str:
        return f"Nested({self.tensors}, {self.mask})"


class Fields:
    """A batch in the form of detectron2: names that are not in the object are looked up in a dict."""

    def __init__(self, **fields: Any) -> None:
        self._fields = fields

    def __getattr__(self, name: str) -> Any:
        if name == "_fields" or name not in self._fields:
            raise AttributeError(name)
        return self._fields[name]

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            super().__setattr__(name, value)
        else:
            self._fields[name] = value

    def __repr__(self) -> str:
        return f"Fields({self._fields})"


class Copied(Nested):
    """An object that says how it is copied."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Copied:
        return self


class Slotted(Nested):
    __slots__ = ("more",)


def copied(value: Any) -> Any:
    return rebuilt(value, lambda leaf, place: leaf.copy() if isinstance(leaf, np.ndarray) else leaf)


@pytest.mark.parametrize(
    "make",
    [
        lambda leaf: {"x": leaf, "n": [1, {"deep": leaf}]},
        lambda leaf: OrderedDict(x=leaf),
        lambda leaf: defaultdict(list, x=[leaf]),
        lambda leaf: deque([leaf], maxlen=3),
        lambda leaf: [leaf, "text", None],
        lambda leaf: (leaf, [leaf]),
        lambda leaf: Pair(leaf, {"y": leaf}),
        lambda leaf: Item(leaf, "one"),
        lambda leaf: Encoding({"input_ids": leaf}, "kept"),
        lambda leaf: Nested(leaf, {"of": [True]}),
        lambda leaf: (Nested(Nested(leaf, None), 1), [leaf]),
        lambda leaf: {"instances": Fields(boxes=Nested(leaf, None), classes=[1])},
    ],
)
def test_a_copy_has_types_and_contents_of_the_original_and_none_of_its_arrays(make: Any) -> None:
    original = make(np.arange(3))
    again = copied(original)
    seen: list[Any] = []
    assert type(again) is type(original) and repr(again) == repr(original)
    rebuilt(original, lambda leaf, place: seen.append(leaf))
    rebuilt(again, lambda leaf, place: seen.append(leaf))
    half = len(seen) // 2
    assert (
        half and len({id(leaf) for leaf in seen}) == half + 1
    )  # the original holds one array in several places


def test_what_is_taken_out_of_a_copy_stays_in_the_original() -> None:
    original: dict[str, Any] = {
        "x": [1],
        "labels": 2,
        "e": Encoding({"ids": 3}, "kept"),
        "s": {1},
        "b": bytearray(b"ab"),
    }
    again = copied(original)
    again["x"].append(2)
    again.pop("labels")
    again["s"].add(2)
    again["b"].extend(b"c")
    assert again["e"].pop("ids") == 3 and again["e"].extra == "kept"
    assert original["e"].ids == 3
    assert (original["x"], original["labels"], original["s"], original["b"]) == ([1], 2, {1}, b"ab")


def around(value: Nested) -> Nested:
    value.mask = [value]
    return value


@pytest.mark.parametrize(
    "make",
    [
        lambda: Copied(1, 2),
        lambda: Slotted(1, 2),
        lambda: object(),
        lambda: around(Nested(1, 2)),
        lambda: Nested(list(range(2000)), 2),
        lambda: Nested(*[[1]] * 2),
    ],
)
def test_an_object_whose_copy_could_be_another_one_is_a_leaf(make: Any) -> None:
    """It has code for its copies, refers to itself, holds much data, or holds one object in two places."""
    original, seen = make(), list[Any]()
    rebuilt([original], lambda leaf, place: seen.append(leaf))
    assert len(seen) == 1 and seen[0] is original


def test_a_leaf_is_named_by_its_positions() -> None:
    places: list[Place] = []

    def leaf(value: Any, place: Place) -> Any:
        places.append(place)
        return value

    rebuilt(({"a": object(), "b": [0, object()]}, object()), leaf)
    assert places == [(0, 0), (0, 1, 1), (1,)]
