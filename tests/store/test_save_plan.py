"""The planner: the writer of every part, for any layout and any set of dead ranks."""

from __future__ import annotations

import sys
from math import prod

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.core.protocol.layout_messages import Layout
from holdfast.errors import StateError
from holdfast.store.layouts import save_plan as planner
from holdfast.store.layouts.coverage import missing
from holdfast.store.layouts.layout import Box, Catalogue, RankLayout, TensorMeta, cut_box, declarations
from holdfast.store.layouts.save_plan import plan
from tests.store.worlds import World, cut, pipeline, replicated, worlds


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the planner cut the tests' small boxes, too."""
    monkeypatch.setattr(planner, "PART_SIZE_BYTES_MIN", 16)


NO_HEALTH_CHECK = settings(max_examples=120, deadline=None)


@NO_HEALTH_CHECK
@given(worlds(), st.data())
def test_every_box_with_a_living_holder_is_written_as_often_as_asked(
    world: World, data: st.DataObject
) -> None:
    catalogue = world.catalogue()
    alive = data.draw(st.frozensets(st.integers(0, world.size - 1)))
    copies = data.draw(st.integers(1, 3))
    shares = plan(catalogue, alive, copies)
    assert set(shares.shares) <= alive
    assert shares == plan(Catalogue.from_json(catalogue.to_json()), alive, copies)
    for tensor in catalogue.tensors:
        for box, ranks in catalogue.boxes(tensor):
            holders = set(ranks) & alive
            if not box.numel and holders:
                named = [rank for rank in alive for item in shares.items(rank) if item.fqn == tensor.fqn]
                assert len(named) == min(copies, len(holders)), "a tensor without elements has copies too"
            counted = np.zeros(tensor.shape, np.int64)
            for rank in alive:
                mine = np.zeros(tensor.shape, np.int64)
                for item in shares.items(rank):
                    if item.fqn == tensor.fqn and item.box == box:
                        assert rank in holders or tensor.size_bytes == 0
                        assert item.box.contains(item.part)
                        mine[cut(item.part)] += 1
                assert mine.max(initial=0) <= 1, "a rank writes an element twice"
                counted += mine
            assert (counted[cut(box)] == min(copies, len(holders))).all()


@NO_HEALTH_CHECK
@given(worlds(), st.data())
def test_uncovered_is_exactly_what_the_dead_alone_held(world: World, data: st.DataObject) -> None:
    catalogue = world.catalogue()
    alive = data.draw(st.frozensets(st.integers(0, world.size - 1), min_size=1))
    shares = plan(catalogue, alive)
    for tensor in catalogue.tensors:
        living = np.zeros(tensor.shape, bool)
        for rank in alive:
            for fqn, box in world.held[rank]:
                if fqn == tensor.fqn:
                    living[cut(box)] = True
        named = np.zeros(tensor.shape, bool)
        for fqn, box in shares.uncovered:
            if fqn == tensor.fqn:
                named[cut(box)] = True
        assert (living | named).all(), "a lost element is not named"
        assert bool(named.any()) == bool((~living).any()), "a covered tensor is called lost"
    assert shares.complete == (shares.why_incomplete() == "")


@NO_HEALTH_CHECK
@given(worlds(edge_max=9), st.data())
def test_a_part_is_one_byte_range_of_its_box(world: World, data: st.DataObject) -> None:
    shares = plan(world.catalogue(), frozenset(range(world.size)))
    for rank in range(world.size):
        state = world.state(rank)
        for item in shares.items(rank):
            if not item.part.numel:
                continue
            array = world.arrays[item.fqn]
            start, stop = item.byte_range(array.itemsize)
            assert bytes(state.view(item.fqn, item.box)[start:stop]) == array[cut(item.part)].tobytes()


def test_a_dead_stage_is_named_whole() -> None:
    shares = plan(pipeline().catalogue(), frozenset({0, 1}))
    assert shares.uncovered == (("stage1.weight", Box((0, 0), (64, 64))),)
    assert "stage1.weight[0:64, 0:64]" in shares.why_incomplete()
    assert plan(pipeline().catalogue(), frozenset({0, 3})).complete


def test_a_region_that_nobody_ever_declared_is_named() -> None:
    half = TensorMeta("w", "F32", (4, 4), Box((0, 0), (2, 4)))
    shares = plan(Catalogue.from_layouts({0: RankLayout(0, (half,), 1)}), frozenset({0}))
    assert shares.uncovered == (("w", Box((2, 0), (2, 4))),)


def test_a_rank_without_a_layout_makes_the_plan_incomplete() -> None:
    world = replicated(2, {"w": np.zeros(4, np.float32)})
    catalogue = Catalogue.from_layouts({0: world.state(0).layout(0, 2)})
    shares = plan(catalogue, frozenset({0}))
    assert not shares.complete
    assert "rank 1 declared no layout" in shares.why_incomplete()
    with pytest.raises(StateError, match="rank 1"):
        plan(catalogue, frozenset({0, 1}))


def test_zero_copies_are_refused() -> None:
    with pytest.raises(StateError, match="copies=0"):
        plan(pipeline().catalogue(), frozenset({0}), copies=0)


def test_loads_are_balanced_by_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    sizes = [5, 3000, 70, 12_000_000, 9, 400_000, 30_000_000, 2_000_000, 64]
    arrays = {f"t{i}": np.zeros(n, np.float32) for i, n in enumerate(sizes)}
    for size in (2, 3, 4, 7):
        world = replicated(size, arrays)
        shares = plan(world.catalogue(), frozenset(range(size)))
        loads = [sum(item.part.numel for item in shares.items(r)) for r in range(size)]
        assert 4 * max(loads) <= 4 * sum(sizes) / size + 2 * planner.PART_SIZE_BYTES_MIN


def test_missing_sees_holes_in_regular_and_irregular_cuts() -> None:
    cells = [Box((i, j), (1, 2)) for i in range(4) for j in (0, 2)]
    assert missing((4, 4), cells) == []
    assert missing((4, 4), cells[:-1]) == [Box((3, 2), (1, 2))]
    assert missing((4, 4), [Box((0, 0), (4, 3)), Box((0, 1), (4, 3))]) == []
    assert missing((), []) == [Box((), ())]
    assert missing((0, 3), [Box((0, 0), (0, 3))]) == []


def parallel(kind: str, world: int, tensors: int) -> dict[int, Layout]:
    """Return the layouts that ``world`` ranks declare:

    ``tensors`` weights of four shapes and a step count, framework-like.
    """
    shapes = [(4096, 1024), (1024, 4096), (1000, 1024), (1024,)]
    layouts = {}
    for rank in range(world):
        metas = [TensorMeta("step", "I64", (), Box((), ()))]
        for number in range(tensors):
            shape = shapes[number % 4]
            if kind == "pipeline" and number * 8 // tensors != rank * 8 // world:
                continue
            steps: dict[int, tuple[int, int]] = {
                "ddp": {},
                "fsdp": {0: (world, rank)},
                "hsdp": {0: (world // 8, rank % (world // 8))},
                "tensor": {number % 2 if len(shape) > 1 else 0: (8, rank % 8)},
                "pipeline": {0: (4, rank % 4)},
            }[kind]
            cuts = tuple((steps[d],) if d in steps else () for d in range(len(shape)))
            metas.append(TensorMeta(f"layer.{number:04d}", "F32", shape, cut_box(shape, cuts), cuts))
        layouts[rank] = RankLayout(rank, tuple(metas), world).encode()
    return layouts


@pytest.mark.parametrize("kind", ["ddp", "fsdp", "hsdp", "tensor", "pipeline"])
def test_the_work_grows_with_ranks_and_tensors_and_not_with_their_product(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    steps: dict[tuple[int, int], tuple[int, int]] = {}
    for world, tensors in [(64, 100), (256, 100), (256, 400)]:
        declared = declarations(parallel(kind, world, tensors))
        counted = [0]

        def count(frame: object, event: str, argument: object, counted: list[int] = counted) -> None:
            counted[0] += event in ("call", "c_call")

        sys.setprofile(count)
        try:
            catalogue = Catalogue.from_declarations(declared)
            joined = counted[0]
            shares = plan(catalogue, frozenset(range(1, world)))
            size_bytes = sum(4 * item.part.numel for item in shares.items(world // 2))
        finally:
            sys.setprofile(None)
        steps[world, tensors] = joined, counted[0] - joined
        assert size_bytes > 0 and shares.complete == (kind != "fsdp")
    for few, many in [((64, 100), (256, 100)), ((256, 100), (256, 400))]:
        for part in (0, 1):
            assert steps[many][part] <= 4.5 * steps[few][part]
    assert sum(steps[256, 400]) < 256 * 400 / 2, "less than one call for each box of the job"


def test_every_share_of_a_large_job_is_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """The byte ranges of all ranks cover each tensor once, and no rank has much more than another."""
    monkeypatch.undo()
    for kind in ("ddp", "hsdp", "tensor", "pipeline"):
        catalogue = Catalogue.from_encoded(parallel(kind, 64, 24))
        for copies in (1, 2):
            shares = plan(catalogue, frozenset(range(64)), copies)
            written = dict.fromkeys(catalogue.by_fqn, 0)
            loads = []
            for rank in range(64):
                loads.append(sum(item.part.numel for item in shares.items(rank)))
                for item in shares.items(rank):
                    written[item.fqn] += item.part.numel
            assert written == {t.fqn: copies * prod(t.shape) for t in catalogue.tensors}
            stage = [max(loads[rank : rank + 8]) - min(loads[rank : rank + 8]) for rank in range(0, 64, 8)]
            assert 4 * max(stage) <= 2 * planner.PART_SIZE_BYTES_MIN
            if kind != "pipeline":  # in a pipeline, stages differ in what they hold
                assert 4 * max(loads) <= 4 * sum(loads) / 64 + 2 * planner.PART_SIZE_BYTES_MIN
