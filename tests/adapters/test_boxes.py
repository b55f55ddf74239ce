"""Regions of sharded tensors, on four ranks."""

from __future__ import annotations

import pytest

from tests.adapters import shards
from tests.adapters.worlds import Worlds

pytestmark = [pytest.mark.torch, pytest.mark.processes]


def test_every_cut_is_known_by_its_boxes(worlds: Worlds) -> None:
    ranks = worlds.values(shards.cut, 4)
    assert [r["replicated"] for r in ranks] == [["[0:10, 0:3]"]] * 4
    assert [r["sharded"] for r in ranks] == [["[0:5, 0:3]"], ["[5:10, 0:3]"]] * 2
    assert [r["nested"] for r in ranks] == [["[0:3, 0:3]"], ["[3:5, 0:3]"], ["[5:8, 0:3]"], ["[8:10, 0:3]"]]
    assert [r["grid"][0] for r in ranks] == ["[0:5, 0:2]", "[0:5, 2:3]", "[5:10, 0:2]", "[5:10, 2:3]"]
    assert [r["strided rows"] for r in ranks] == [
        ["[0:3, 0:6]"],
        ["[5:8, 0:6]"],
        ["[3:5, 0:6]"],
        ["[8:10, 0:6]"],
    ]
    assert [r["plain rows"] for r in ranks] == [
        ["[0:3, 0:6]"],
        ["[3:5, 0:6]"],
        ["[5:8, 0:6]"],
        ["[8:10, 0:6]"],
    ]
    assert all(r["strided columns"] for r in ranks)
    assert all(r["pending"] == ["refused"] for r in ranks)


def test_tensors_of_one_form_are_cut_once_whatever_is_collected(worlds: Worlds) -> None:
    assert worlds.values(shards.cut_once, 4) == [{"cuts": 2, "later": 0, "tensors": 10, "same": True}] * 4


@pytest.mark.parametrize("declared", [[0], [3], [1, 2]])
def test_layouts_that_came_too_late_are_completed(worlds: Worlds, declared: list[int]) -> None:
    assert worlds.values(shards.late_layouts, 4, declared=declared) == [""] * 4
