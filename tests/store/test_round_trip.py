"""Saves in any layout load into any layout, bit for bit."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.errors import CheckpointMismatch, StateError, StoreWriteError
from holdfast.frameworks.common.numpy_state import NumpyState, Shard
from holdfast.store.layouts import save_plan as planner
from holdfast.store.layouts.layout import Box
from holdfast.store.layouts.save_plan import plan
from holdfast.store.read import load
from holdfast.store.read.load import LoadTarget, load_catalogue, load_into, load_locals, load_values
from holdfast.store.read.validation import inspect
from holdfast.store.write import writer
from holdfast.store.write.writer import write_share
from tests.store.worlds import World, pipeline, random_array, replicated, save, save_id, worlds


@pytest.fixture(autouse=True, scope="module")
def small_units() -> Iterator[None]:
    """Cut parts, extents and batches small, so that small tensors have several of each."""
    with (
        mock.patch.object(planner, "PART_SIZE_BYTES_MIN", 64),
        mock.patch.object(writer, "EXTENT_SIZE_BYTES", 4096),
        mock.patch.object(load, "BATCH_SIZE_BYTES", 10_000),
    ):
        yield


def load_all(path: Path, world: World, threads: int = 2) -> None:
    """Load every rank of ``world`` and compare."""
    for rank in range(world.size):
        state = world.state(rank, empty=True)
        report = load_into(path, state.targets(), known=world.arrays, threads=threads)
        assert report.healed == () and report.missing == ()
        world.check(state)


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_any_layout_loads_into_any_other(data: st.DataObject) -> None:
    before = data.draw(worlds())
    after = data.draw(worlds(arrays=before.arrays))
    with tempfile.TemporaryDirectory() as root:
        written = save(Path(root), before, save_id(), copies=data.draw(st.integers(1, 2)))
        assert [w.sealed for w in written] == [False] * (len(written) - 1) + [True]
        path = Path(root) / save_id().directory()
        found = inspect(path, deep=True)
        assert found.valid and found.sealed and found.damage == (), found
        load_all(path, after)


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_tensors_of_many_extents(data: st.DataObject) -> None:
    arrays = {
        "wide": random_array((7, 2100), "float32", 1),
        "tall": random_array((2000, 3), "float64", 2),
        "cube": random_array((9, 30, 31), "int16", 3),
    }
    before, after = data.draw(worlds(arrays=arrays)), data.draw(worlds(arrays=arrays))
    with tempfile.TemporaryDirectory() as root:
        save(Path(root), before, save_id(), threads=data.draw(st.integers(1, 3)))
        load_all(Path(root) / save_id().directory(), after)


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_a_last_gasp_of_the_living_loads_or_is_refused(data: st.DataObject) -> None:
    before = data.draw(worlds())
    alive = data.draw(st.frozensets(st.integers(0, before.size - 1), min_size=1))
    complete = plan(before.catalogue(), alive).complete
    with tempfile.TemporaryDirectory() as root:
        if not complete:
            with pytest.raises(StateError, match="no living rank holds"):
                save(Path(root), before, save_id(), sources=alive)
            assert list(Path(root).iterdir()) == []
            return
        save(Path(root), before, save_id(), sources=alive)
        load_all(Path(root) / save_id().directory(), before)


def test_values_and_locals(tmp_path: Path) -> None:
    world = pipeline()
    catalogue, shares = world.catalogue(), plan(world.catalogue(), frozenset({0, 2, 3}))
    values = {"scheduler": {"milestones": {30: 1}, "base": (0.1, float("inf"))}, "step": 12}
    for rank in shares.sources:
        own = {rank: {"position": rank}, 1: {"position": f"of the dead, saved by {rank}"}}
        write_share(tmp_path, save_id(), catalogue, shares, rank, world.state(rank), values, own)
    path = tmp_path / save_id().directory()
    assert load_values(path) == values
    assert load_locals(path, 2) == {"position": 2}
    assert load_locals(path, 1) == {"position": "of the dead, saved by 0"}
    assert load_locals(path, 9) == {}
    assert load_catalogue(path) == catalogue


def test_an_unsavable_value_is_named_and_nothing_is_written(tmp_path: Path) -> None:
    world = replicated(1, {"w": np.zeros(4, np.float32)})
    shares = plan(world.catalogue(), frozenset({0}))
    with pytest.raises(StateError, match=r"values\['sampler'\]\['lock'\] is a builtins.object"):
        write_share(
            tmp_path,
            save_id(),
            world.catalogue(),
            shares,
            0,
            world.state(0),
            {"sampler": {"lock": object()}},
            {},
        )
    with pytest.raises(StateError, match="the limit is"):
        write_share(
            tmp_path, save_id(), world.catalogue(), shares, 0, world.state(0), {"b": bytes(2**24)}, {}
        )
    assert list(tmp_path.iterdir()) == []


def test_saving_twice_is_harmless_but_other_content_is_refused(tmp_path: Path) -> None:
    world = pipeline()
    save(tmp_path, world, save_id())
    path = tmp_path / save_id().directory()
    before = {p.name: (p.stat().st_ino, p.stat().st_mtime_ns) for p in path.iterdir()}
    assert all(w.sealed for w in save(tmp_path, world, save_id()))
    assert {p.name: (p.stat().st_ino, p.stat().st_mtime_ns) for p in path.iterdir()} == before
    world.arrays["stage0.weight"] = random_array((64, 64), "float32", 99)
    with pytest.raises(StoreWriteError, match="already written other content"):
        save(tmp_path, world, save_id())
    world = pipeline(edge=32)
    with pytest.raises(StoreWriteError, match="another catalogue"):
        save(tmp_path, world, save_id())
    load_all(path, pipeline())


def test_a_source_that_offers_the_wrong_bytes_is_named(tmp_path: Path) -> None:
    world = replicated(1, {"w": np.zeros(8, np.float32)})

    class Wrong:
        def view(self, fqn: str, box: Box) -> memoryview:
            return memoryview(bytes(31))

    shares = plan(world.catalogue(), frozenset({0}))
    with pytest.raises(StateError, match=r"'w': 31 bytes offered for part \[0:8\] of 32"):
        write_share(tmp_path, save_id(), world.catalogue(), shares, 0, Wrong(), {}, {})


def test_another_model_is_refused_with_the_differences(tmp_path: Path) -> None:
    world = replicated(1, {"a": np.ones((4, 4), np.float32), "b": np.ones(3), "c": np.ones(2)})
    save(tmp_path, world, save_id())
    path = tmp_path / save_id().directory()
    other = NumpyState.whole(
        {"a": np.zeros((5, 4), np.float32), "b": np.zeros(3, np.float32), "d": np.zeros(2)}
    )
    with pytest.raises(CheckpointMismatch) as caught:
        load_into(path, other.targets())
    text = str(caught.value)
    assert "4 differences" in text
    assert "mismatch: a is F32 [4, 4] in the checkpoint, F32 [5, 4] in the model" in text
    assert "mismatch: b is F64 [3] in the checkpoint, F32 [3] in the model" in text
    assert "missing: d" in text and "unexpected: c" in text
    assert all(not shard.array.any() for shard in other.shards), "nothing may be loaded"
    many = NumpyState.whole({f"x{i:02d}": np.zeros(1) for i in range(20)})
    with pytest.raises(CheckpointMismatch, match="and 13 more"):
        load_into(path, many.targets())


def test_a_smaller_box_of_a_larger_tensor_is_not_taken_for_it(tmp_path: Path) -> None:
    save(tmp_path, replicated(1, {"a": np.ones((4, 4), np.float32)}), save_id())
    small = NumpyState.whole({"a": np.zeros((2, 4), np.float32)})
    with pytest.raises(CheckpointMismatch, match="mismatch: a"):
        load_into(tmp_path / save_id().directory(), small.targets())


def test_optional_names_may_be_missing_on_either_side(tmp_path: Path) -> None:
    save(tmp_path, replicated(1, {"a": np.ones(4), "ema.a": np.ones(4)}), save_id())
    state = NumpyState.whole({"a": np.zeros(4), "head.w": np.full(4, 5.0)})
    report = load_into(tmp_path / save_id().directory(), state.targets(), optional=("ema.*", "head.*"))
    assert report.missing == ("head.w",)
    assert [shard.array.tolist() for shard in state.shards] == [[1.0] * 4, [5.0] * 4]


def test_targets_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    save(tmp_path, replicated(1, {"a": np.ones(4)}), save_id())
    path, box = tmp_path / save_id().directory(), Box((0,), (4,))
    with pytest.raises(StateError, match="writable flat buffer of 32 bytes"):
        load_into(path, [LoadTarget("a", box, "F64", memoryview(bytes(32)), (4,))])
    with pytest.raises(StateError, match="got 31 bytes"):
        load_into(path, [LoadTarget("a", box, "F64", memoryview(bytearray(31)), (4,))])
    with pytest.raises(StateError, match="outside"):
        load_into(path, [LoadTarget("a", Box((1,), (4,)), "F64", memoryview(bytearray(32)), (4,))])


def test_arrays_that_cannot_be_saved_are_named() -> None:
    with pytest.raises(StateError, match="dtype object"):
        NumpyState.whole({"a": np.array([object()])})
    with pytest.raises(StateError, match="dtype >f8"):
        NumpyState.whole({"a": np.zeros(3, ">f8")})
    with pytest.raises(StateError, match="C-contiguous"):
        NumpyState([Shard("a", (3, 4), Box((0, 0), (4, 3)), np.zeros((3, 4)).T)])
    with pytest.raises(StateError, match="not held here"):
        NumpyState.whole({"a": np.zeros(3)}).view("b", Box((0,), (3,)))
