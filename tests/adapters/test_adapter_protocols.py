"""The parts of the adapter protocol stay small, and the whole protocol consists only of its parts."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

from holdfast.frameworks.common.adapter import Adapter, GroupAdapter, StateAdapter, StepAdapter

METHODS_MAX = 8
DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "new-framework.md"
PARTS = (StateAdapter, StepAdapter, GroupAdapter)


def methods(protocol: type) -> set[str]:
    """Return the methods that a protocol itself defines."""
    return {name for name, member in vars(protocol).items() if inspect.isfunction(member) and name[0] != "_"}


@pytest.mark.parametrize("part", PARTS)
def test_a_part_of_the_adapter_has_few_methods(part: type) -> None:
    assert 0 < len(methods(part)) <= METHODS_MAX


def test_the_adapter_is_its_parts_and_no_method_is_in_two_of_them() -> None:
    assert methods(Adapter) == set() and set(Adapter.__bases__) >= set(PARTS)
    names = [name for part in PARTS for name in methods(part)]
    assert len(names) == len(set(names))


def test_the_document_names_the_methods_of_each_part() -> None:
    rows = re.findall(r"^\| `(\w+)` \| (state|step|groups) \|", DOCUMENT.read_text(), re.MULTILINE)
    found = [{method for method, part in rows if part == name} for name in ("state", "step", "groups")]
    assert found == [methods(part) for part in PARTS]
