"""The schedule of comparisons: all holders compare the same bytes at a step, and K steps cover everything."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.store.layouts.box import Extent
from holdfast.store.layouts.layout import Box, Catalogue, RankLayout, TensorMeta
from holdfast.store.layouts.replica_digests import ReplicaCopies, runs

WORLD = 4


def layouts(sizes: list[int], sharded: bool) -> Catalogue:
    """Return layouts of ``sizes`` tensors on all ranks. With ``sharded``, ranks r and r + 2 hold the same half."""
    found = {}
    for rank in range(WORLD):
        metas = []
        for index, size in enumerate(sizes):
            box = Box((rank % 2 * size,), (size,)) if sharded else Box((0,), (2 * size,))
            metas.append(TensorMeta(f"t{index:03}", "F32", (2 * size,), box))
        metas.append(TensorMeta("steps", "F32", (3,), Box.whole((3,))))
        metas.append(TensorMeta(f"own.{rank}", "F32", (5,), Box.whole((5,))))
        metas.append(TensorMeta("buffer", "F32", (5,), Box.whole((5,))))
        found[rank] = RankLayout(rank, tuple(metas), WORLD)
    return Catalogue.from_layouts(found)


@given(st.lists(st.integers(1, 400), min_size=1, max_size=12), st.integers(1, 20), st.booleans())
def test_all_of_it_once_in_k_turns_and_the_same_on_all_holders(
    sizes: list[int], turns: int, sharded: bool
) -> None:
    catalogue = layouts(sizes, sharded)
    ranks = [ReplicaCopies(catalogue, rank, lambda fqn: fqn != "buffer", turns) for rank in range(WORLD)]
    assert len({copies.plan for copies in ranks}) == 1 and ranks[0].plan > 0
    for rank, copies in enumerate(ranks):
        seen: dict[tuple[str, Box], int] = {}
        for turn in range(turns):
            for group, extents in copies.turn(turn):
                for holder in group.holders:
                    assert extents in [e for g, e in ranks[holder].turn(turn) if g.holders == group.holders]
                for extent in extents:
                    assert seen.get((extent.fqn, extent.box), 0) == extent.start
                    seen[extent.fqn, extent.box] = extent.stop
        whole = {(e.fqn, e.box): e.stop for _, extents in copies.whole() for e in extents}
        assert seen == whole and ("buffer", Box.whole((5,))) not in seen
        assert not any(fqn.startswith("own") for fqn, _ in seen)
        assert len(seen) == len(sizes) + 1
        assert all(rank in group.holders for group in copies.groups)
    for group in ranks[0].groups:
        factors = [g.factor for copies in ranks for g in copies.groups if g.holders == group.holders]
        assert sum(factors) == 0 and len(factors) == len(group.holders)


def test_other_layouts_are_another_plan() -> None:
    one, other = (ReplicaCopies(layouts([4, size], False), 0, lambda fqn: True, 3).plan for size in (4, 5))
    assert one != other


def test_a_rank_that_lacks_a_tensor_of_another_rank_is_not_complete() -> None:
    metas = [TensorMeta(name, "F32", (4,), Box.whole((4,))) for name in ("a", "b")]
    for held, complete in (((2, 2), [True, True]), ((1, 2), [False, True])):
        ranks = {rank: RankLayout(rank, tuple(metas[: held[rank]]), 2) for rank in range(2)}
        catalogue = Catalogue.from_layouts(ranks)
        copies = [ReplicaCopies(catalogue, rank, lambda fqn: True, 3) for rank in range(2)]
        assert [each.complete for each in copies] == complete


@pytest.mark.parametrize(("count", "parts"), [(0, 0), (1, 1), (32, 32), (33, 17), (5000, 32)])
def test_runs_are_bounded_and_named(count: int, parts: int) -> None:
    extents = [Extent(f"t{i}", Box.whole((2,)), 0, 8) for i in range(count)]
    found = runs(extents)
    assert len(found) == parts and sum(len(part) for _, part in found) == count
    if count == 33:
        assert found[0][0] == "t0[0:2] to t1[0:2] (2 parts)"
