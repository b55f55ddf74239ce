"""Boxes, rank layouts and the catalogue."""

from __future__ import annotations

from math import prod

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.core.protocol.layout_messages import Layout
from holdfast.errors import StateError
from holdfast.store.layouts.layout import (
    Box,
    Catalogue,
    RankLayout,
    TensorMeta,
    cut_box,
    flat_range_boxes,
    subtract,
)
from holdfast.store.layouts.shardings import Cuts, check_cuts
from tests.store.worlds import World, cut, replicated, worlds

SHAPES = st.lists(st.integers(1, 6), max_size=4).map(tuple)


@st.composite
def boxes_in(draw: st.DrawFn, shape: tuple[int, ...]) -> Box:
    offsets = [draw(st.integers(0, n - 1)) for n in shape]
    return Box(
        tuple(offsets), tuple(draw(st.integers(1, n - o)) for n, o in zip(shape, offsets, strict=True))
    )


@given(st.data())
def test_box_algebra_agrees_with_painting_arrays(data: st.DataObject) -> None:
    shape = data.draw(SHAPES)
    box, covers = data.draw(boxes_in(shape)), data.draw(st.lists(boxes_in(shape), max_size=4))
    painted = np.zeros(shape, np.int64)
    painted[cut(box)] = 1
    for cover in covers:
        common = box.intersect(cover)
        expected = np.zeros(shape, np.int64)
        expected[cut(box)] += 1
        expected[cut(cover)] += 1
        assert (0 if common is None else common.numel) == int((expected == 2).sum())
        assert box.contains(cover) == (common == cover)
        painted[cut(cover)] = 0
    counted = np.zeros(shape, np.int64)
    for piece in subtract(box, covers):
        counted[cut(piece)] += 1
    assert np.array_equal(counted, painted)


@given(st.data())
def test_a_flat_range_is_a_few_contiguous_boxes_in_order(data: st.DataObject) -> None:
    shape = data.draw(SHAPES)
    start = data.draw(st.integers(0, prod(shape)))
    stop = data.draw(st.integers(start, prod(shape)))
    numbers = np.arange(prod(shape)).reshape(shape)
    boxes = flat_range_boxes(shape, start, stop)
    found = [int(n) for box in boxes for n in numbers[cut(box)].reshape(-1)]
    assert found == list(range(start, stop))
    assert len(boxes) <= max(1, 2 * len(shape) - 1)


def test_a_flat_range_outside_is_refused() -> None:
    with pytest.raises(StateError, match="3:9 is outside"):
        flat_range_boxes((2, 4), 3, 9)


@settings(max_examples=60)
@given(worlds())
def test_catalogue_is_canonical_and_complete(world: World) -> None:
    catalogue = world.catalogue()
    layouts = world.layouts()
    shuffled = {
        r: RankLayout(r, tuple(reversed(la.tensors)), la.world) for r, la in reversed(layouts.items())
    }
    assert Catalogue.from_layouts(shuffled).digest == catalogue.digest
    assert Catalogue.from_encoded({r: la.encode() for r, la in layouts.items()}) == catalogue
    assert Catalogue.from_json(catalogue.to_json()) == catalogue
    declared = [{(fqn, box) for fqn, box in held if box.numel} for held in world.held]
    for rank in range(world.size):
        own = catalogue.held_by(rank)
        assert {(t.fqn, box) for t, box, _ in own if box.numel} == declared[rank]
        assert all((box, ranks) in catalogue.boxes(t) for t, box, ranks in own)
    for tensor in catalogue.tensors:
        for box, ranks in catalogue.boxes(tensor):
            assert ranks
            if box.numel:
                assert ranks == tuple(r for r in range(world.size) if (tensor.fqn, box) in declared[r])


def test_one_grid_serves_all_shapes_that_are_cut_alike() -> None:
    shapes = [(8, 3), (9, 5), (1, 7), (3, 2)]
    layouts = {}
    for rank in range(4):
        cuts: Cuts = (((4, rank),), ())
        metas = [TensorMeta(f"w{n}", "F32", s, cut_box(s, cuts), cuts) for n, s in enumerate(shapes)]
        layouts[rank] = RankLayout(rank, (*metas, TensorMeta("s", "F32", (), Box((), ()))), 4)
    catalogue = Catalogue.from_layouts(layouts)
    assert [len(grid.cells) for grid in catalogue.grids] == [1, 4]
    assert len({layout.encode().table for layout in layouts.values()}) == 1, "one table"
    found = [(box.offsets, box.sizes, ranks) for box, ranks in catalogue.boxes(catalogue.by_fqn["w1"])]
    assert found == [((0, 0), (3, 5), (0,)), ((3, 0), (3, 5), (1,)), ((6, 0), (3, 5), (2,))]
    assert catalogue.boxes(catalogue.by_fqn["w2"]) == [(Box((0, 0), (1, 7)), (0,))]


def test_cuts_that_do_not_give_the_box_are_refused() -> None:
    for cuts, rule in [((((2, 0),), ()), "not the part"), ((((2, 0),),), "cuts of 1 dimensions")]:
        meta = TensorMeta("w", "F32", (4, 4), Box((2, 0), (2, 4)), cuts)
        with pytest.raises(StateError, match=rule):
            Catalogue.from_layouts({0: RankLayout(0, (meta,), 1)})
    for steps, rule in [(((2, 2),), "no cut"), (((1, 0),), "no cut"), (((2, 0),) * 9, "cut 9 times")]:
        with pytest.raises(StateError, match=rule):
            check_cuts((steps,))


def test_replicas_form_one_class() -> None:
    world = replicated(64, {"w": np.zeros((4, 4), np.float32), "s": np.zeros((), np.int64)})
    catalogue = world.catalogue()
    assert [grid.holders for grid in catalogue.grids] == [(tuple(range(64)),)] * 2
    assert catalogue.boxes(catalogue.by_fqn["s"]) == [(Box((), ()), tuple(range(64)))]
    assert catalogue.size_bytes == 64 + 8


def test_missing_ranks_are_named() -> None:
    world = replicated(3, {"w": np.zeros(4, np.float32)})
    layouts = {r: world.state(r).layout(r, 3) for r in (0, 2)}
    assert Catalogue.from_layouts(layouts).absent == (1,)


def _layout(rank: int, meta: TensorMeta, world: int = 2) -> RankLayout:
    return RankLayout(rank, (meta,), world)


GOOD = TensorMeta("w", "F32", (4, 4), Box((0, 0), (4, 4)))


@pytest.mark.parametrize(
    ("meta", "rule"),
    [
        (TensorMeta("w", "F32", (4, 5), Box((0, 0), (4, 5))), "rank 1 declares F32 \\[4, 5\\]"),
        (TensorMeta("w", "F64", (4, 4), Box((0, 0), (4, 4))), "rank 1 declares F64"),
        (TensorMeta("v", "F33", (4, 4), Box((0, 0), (4, 4))), "unknown dtype 'F33'"),
        (TensorMeta("v", "F32", (4, 4), Box((1, 0), (4, 4))), "is outside"),
        (TensorMeta("v", "F32", (4, 4), Box((-1, 0), (4, 4))), "is outside"),
        (TensorMeta("v", "F32", (4, 4), Box((0,), (4,))), "not the dimensions"),
        (TensorMeta("", "F32", (4, 4), Box((0, 0), (4, 4))), "0 characters"),
        (TensorMeta("a\nb", "F32", (4, 4), Box((0, 0), (4, 4))), "control characters"),
        (TensorMeta("__metadata__", "F32", (4, 4), Box((0, 0), (4, 4))), "reserved"),
    ],
)
def test_wrong_declarations_are_refused_by_name(meta: TensorMeta, rule: str) -> None:
    with pytest.raises(StateError, match=rule):
        Catalogue.from_layouts({0: _layout(0, GOOD), 1: _layout(1, meta)})


def test_ranks_that_disagree_about_the_world_are_refused() -> None:
    with pytest.raises(StateError, match="world size"):
        Catalogue.from_layouts({0: _layout(0, GOOD), 1: _layout(1, GOOD, world=3)})
    with pytest.raises(StateError, match="given as rank 1"):
        Catalogue.from_layouts({1: _layout(0, GOOD)})


def test_layout_json_round_trip_and_refusal() -> None:
    assert RankLayout.decode(_layout(0, GOOD).encode()) == _layout(0, GOOD)
    good = _layout(0, GOOD).encode()
    wrong = (b"", b"[]", b'{"rank":0}', b'{"rank":0,"tensors":[{"fqn":1}],"world":2}')
    tables = (b"", b"{}", b'[{"fqn":1}]', b'{"rank":0,"tensors":[{"fqn":1}],"world":2}')
    for bad in (*(Layout(own, good.table) for own in wrong), *(Layout(good.own, table) for table in tables)):
        with pytest.raises(StateError, match="not a rank layout"):
            RankLayout.decode(bad)
        with pytest.raises(StateError, match="not a rank layout"):
            Catalogue.from_encoded({0: bad})


def test_empty_local_shards_are_dropped_but_empty_tensors_kept() -> None:
    empty_shard = TensorMeta("w", "F32", (4, 4), Box((4, 0), (0, 4)))
    empty_tensor = TensorMeta("e", "I64", (0, 3), Box((0, 0), (0, 3)))
    catalogue = Catalogue.from_layouts(
        {0: _layout(0, GOOD), 1: RankLayout(1, (empty_shard, empty_tensor), 2)}
    )
    assert [catalogue.boxes(t) for t in catalogue.tensors] == [
        [(Box((0, 0), (0, 3)), (1,))],
        [(Box((0, 0), (4, 4)), (0,))],
    ]
