"""The attributes that objects in ``state=`` keep, by the source of their ``state_dict()``."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast.session.variables.kept_attributes import kept_by, read_by_property


class Average:
    """An average with a count of its updates."""

    def __init__(self) -> None:
        self.updates, self.decay = 0, 0.9


class Some:
    """An object that keeps some of its attributes."""

    def __init__(self) -> None:
        self.seen, self.weight, self.average, self.log = 0, 1.0, Average(), {"loss": 0.0}
        self.none = None

    def state_dict(self) -> dict[str, Any]:
        """Return two attributes, one of them by another method."""
        return {
            "n": self.average.updates,
            "log": self._log(),
            "last": self.log.get("loss"),
            "none": self.none,
        }

    def _log(self) -> dict[str, Any]:
        return {"samples": self.seen}


class All(Some):
    """An object that keeps all of its attributes."""

    def state_dict(self) -> dict[str, Any]:
        """Return all attributes."""
        return {key: value for key, value in self.__dict__.items() if key != "average"}


class Whole(Some):
    """An object that gives itself to another function."""

    def state_dict(self) -> dict[str, Any]:
        """Return all attributes."""
        return dict(vars(self))


class Inherited(Some):
    """An object that adds to what its base class keeps."""

    def state_dict(self) -> dict[str, Any]:
        """Return the attributes that the base class keeps."""
        return super().state_dict()


class Around:
    """An object that keeps those of another one."""

    def __init__(self, inner: Some) -> None:
        self.inner = inner

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the other object."""
        return {"inner": self.inner.state_dict()}


@pytest.mark.parametrize("wrapped", [False, True])
def test_an_attribute_that_the_state_does_not_have_is_not_kept(wrapped: bool) -> None:
    some = Some()
    attributes, objects = kept_by([Around(some) if wrapped else some])
    assert {(id(some), "seen"), (id(some.average), "updates")} <= attributes
    assert (id(some), "weight") not in attributes and (id(some.average), "decay") not in attributes
    assert id(some) not in objects and id(some.average) not in objects
    assert id(some.log) in objects and id(None) not in objects


class Phases:
    """An object with others in a list and in a dict, of which it keeps counts."""

    def __init__(self) -> None:
        self.phases, self.named, self.others = [Average(), Average()], {"a": Some()}, [Average()]

    def state_dict(self) -> dict[str, Any]:
        """Return the counts."""
        named = {}
        for name, each in self.named.items():
            named[name] = each.seen
        return {"n": [phase.updates for phase in self.phases], "named": named}


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_loop_over_a_container_keeps_attributes_of_its_items(wrapped: bool) -> None:
    """Regression: a warning named the counts of phases (CycleScheduler) that the state has."""
    item = Phases()
    attributes, objects = kept_by([Around(item) if wrapped else item])  # type: ignore[arg-type]
    assert {(id(each), "updates") for each in item.phases} <= attributes
    assert (id(item.named["a"]), "seen") in attributes and (id(item.named["a"]), "weight") not in attributes
    assert (id(item.phases[0]), "decay") not in attributes and (
        id(item.others[0]),
        "updates",
    ) not in attributes
    assert id(item.phases[0]) not in objects


@pytest.mark.parametrize("kind", [All, Whole, Inherited])
def test_an_object_whose_state_may_have_all_attributes_is_kept_whole(kind: type[Some]) -> None:
    item = kind()
    assert id(item) in kept_by([item]).objects


def test_an_object_of_a_library_is_kept_whole() -> None:
    item = type("Compiled", (), {"state_dict": staticmethod(dict)})()
    assert id(item) in kept_by([item]).objects and kept_by([]) == (frozenset(), frozenset())


LIMIT = 3


class Buffer:
    """A buffer whose counts are in a dict."""

    def __init__(self) -> None:
        self.counts, self.average = {"size": 0}, Average()

    @property
    def size(self) -> int:
        """Return a count."""
        return int(self.counts["size"] + self.average.updates)

    @property
    def limited(self) -> int:
        """Return a count, limited by a variable of the module."""
        return min(self.counts["size"], LIMIT)

    @property
    def whole(self) -> str:
        """Return a text about the whole object."""
        return repr(self)


def test_the_attributes_from_which_a_property_computes_its_value() -> None:
    item = Buffer()
    assert read_by_property(item, "size") == ["counts", "average.updates"]
    for name in ("limited", "whole", "counts", "missing"):
        assert read_by_property(item, name) == []
    assert read_by_property(None, "size") == []
