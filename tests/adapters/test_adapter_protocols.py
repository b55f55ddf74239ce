"""The parts of the adapter protocol stay small, and the whole is nothing but its parts."""

from __future__ import annotations

import inspect

import pytest

from holdfast.frameworks.common.adapter import Adapter, GroupAdapter, StateAdapter, StepAdapter

METHODS_MAX = 8
PARTS = (StateAdapter, StepAdapter, GroupAdapter)


def methods(protocol: type) -> set[str]:
    """The methods that a protocol itself asks for."""
    return {name for name, member in vars(protocol).items() if inspect.isfunction(member) and name[0] != "_"}


@pytest.mark.parametrize("part", PARTS)
def test_a_part_of_the_adapter_has_few_methods(part: type) -> None:
    assert 0 < len(methods(part)) <= METHODS_MAX


def test_the_adapter_is_its_parts_and_no_method_is_in_two_of_them() -> None:
    assert methods(Adapter) == set() and set(Adapter.__bases__) >= set(PARTS)
    names = [name for part in PARTS for name in methods(part)]
    assert len(names) == len(set(names))
