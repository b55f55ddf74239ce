"""The layout of DDP's buckets is set without a pass, taken from a loaded state, and made equal on all ranks."""

from __future__ import annotations

from typing import Any

import pytest

from tests.adapters import bucket_orders
from tests.adapters.bucket_orders import CAP_MB, FIRST, OTHER
from tests.adapters.worlds import Worlds

pytestmark = [pytest.mark.torch, pytest.mark.processes]

EXACT = 1e-4


def test_a_layout_is_set_without_a_pass_and_a_wrong_one_changes_nothing(worlds: Worlds) -> None:
    """DDP copies gradients of other parameters if its buckets and those of a peer differ."""
    for seen in worlds.values(bucket_orders.set_buckets, 2):
        assert seen["given"] == FIRST and seen["refused"] == 2 and seen["error"] < EXACT
        assert seen["ordered"][0][0] == 0 and seen["recorded"][0][0] == 7
        assert seen["logged"] == seen["recorded"]


@pytest.mark.parametrize(
    ("cap", "static", "rehearses"), [(CAP_MB, False, False), (1.0, False, True), (CAP_MB, True, True)]
)
def test_a_new_process_takes_the_loaded_layout_if_it_fits(
    worlds: Worlds, cap: float, static: bool, rehearses: bool
) -> None:
    """Other limits of the buckets are a wish of the script. ``static_graph`` needs separate passes."""
    for seen in worlds.values(bucket_orders.load, 2, cap=cap, static=static):
        assert seen["before"] == [None]
        assert seen["rehearses"] == rehearses and seen["unready"] == int(rehearses) and seen["values"]
        assert seen["excused"] == (not static)


@pytest.mark.parametrize("find", [False, True])
def test_a_static_graph_takes_from_the_loaded_state_what_peers_use(worlds: Worlds, find: bool) -> None:
    """Regression: with ``find_unused_parameters`` the first pass with peers raised an error of a late wait."""
    for seen in worlds.values(bucket_orders.load_used, 2, find=find):
        assert seen["equal"] == [True] * 4


@pytest.mark.timeout(60)
def test_the_layouts_are_read_while_a_backward_pass_runs(worlds: Worlds) -> None:
    """Regression: the read waited for the reducer with the GIL, and the reducer for the GIL: a recovery stood still."""
    for seen in worlds.values(bucket_orders.read_in_a_pass, 2):
        assert seen == {"used": [2] * 8}


@pytest.mark.parametrize(
    ("known", "agreed"),
    [
        ([FIRST, FIRST, FIRST], FIRST),
        ([None, FIRST, FIRST], FIRST),
        ([OTHER, FIRST, None], OTHER),
        ([None, None, None], None),
    ],
)
def test_all_ranks_take_the_layout_of_the_lowest_rank_that_knows_one(
    worlds: Worlds, known: list[Any], agreed: Any
) -> None:
    for seen in worlds.values(bucket_orders.agree, 3, known=known):
        assert seen == {"values": [agreed], "error": pytest.approx(0, abs=EXACT)}


def test_groups_with_other_models_agree_each_on_its_own_layout(worlds: Worlds) -> None:
    seen = worlds.values(bucket_orders.agree_in_groups, 4)
    assert [each["values"] for each in seen] == [[FIRST], [OTHER]] * 2
    assert all(each["error"] < EXACT for each in seen)


def test_a_layout_that_nobody_knows_is_replaced_on_all_ranks(worlds: Worlds) -> None:
    one, other = worlds.values(bucket_orders.agree_unknown, 2)
    assert one["values"] == other["values"] != [None] and one["values"][0][0][0] == 0
    assert max(one["error"], other["error"]) < EXACT
