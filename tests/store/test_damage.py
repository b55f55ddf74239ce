"""Real damage to real files: every kind is detected, named, and repaired where copies allow it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest

from holdfast.errors import CheckpointInvalid, StoreWriteError
from holdfast.frameworks.common.numpy_state import NumpyState
from holdfast.store.backends.location import Place
from holdfast.store.format.manifest import SEAL_NAME
from holdfast.store.read.load import load_into, opened
from holdfast.store.read.validation import inspect
from tests.store.worlds import World, pipeline, random_array, replicated, save, save_id


def flip(path: Path, position: int, bit: int = 0) -> None:
    """Flip one bit in place."""
    with path.open("r+b") as file:
        file.seek(position)
        byte = file.read(1)[0]
        file.seek(position)
        file.write(bytes([byte ^ (1 << bit)]))


def load(path: Place, world: World) -> tuple[str, ...]:
    """Load everything on every rank and compare. Returns the healed parts."""
    healed: tuple[str, ...] = ()
    for rank in range(world.size):
        state = world.state(rank, empty=True)
        healed += load_into(path, state.targets(), known=world.arrays).healed
        world.check(state)
    return healed


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Path, World]:
    """Save a checkpoint of two pipeline stages with two replicas each."""
    world = pipeline()
    save(tmp_path, world, save_id())
    return tmp_path / save_id().directory(), world


def test_what_is_said_of_a_hole_is_what_made_it(tmp_path: Path) -> None:
    """Other damage, which a copy can repair, is found first. The message must not name it as the reason."""
    world = replicated(2, {name: random_array((20, 10), "float32", n) for n, name in enumerate("ab")})
    save(tmp_path, world, save_id(), copies=2)
    path = tmp_path / save_id().directory()
    shards = sorted(path.glob("shard-*"))
    pristine = {shard: shard.read_bytes() for shard in shards}
    flip(shards[0], pristine[shards[0]].index(world.arrays["a"].tobytes()))
    assert load(path, world)
    for shard in shards:
        flip(shard, pristine[shard].index(world.arrays["b"].tobytes()))
    found = inspect(path, deep=True)
    assert not found.valid and "of b[0:20, 0:10] do not match" in found.reason, found.reason


def test_one_bit_flipped_anywhere_in_any_file_is_found(saved: tuple[Path, World]) -> None:
    path, world = saved
    for file in sorted(path.iterdir()):
        pristine = file.read_bytes()
        for position in {0, 7, 9, len(pristine) // 3, len(pristine) // 2, len(pristine) - 1}:
            flip(file, position, position % 8)
            found = inspect(path, deep=True)
            assert file.name in " ".join(found.damage), (file.name, position)
            assert found.valid == (file.name == "SEALED")
            file.write_bytes(pristine)
    assert inspect(path, deep=True).damage == ()
    assert load(path, world) == ()


def test_a_flipped_bit_of_a_tensor_stops_the_load_and_names_the_extent(saved: tuple[Path, World]) -> None:
    path, world = saved
    shard = next(p for p in sorted(path.glob("shard-*")) if p.stat().st_size > 5000)
    flip(shard, shard.stat().st_size - 20)
    assert inspect(path).valid, "the shallow check does not read tensors"
    with pytest.raises(CheckpointInvalid, match=rf"{shard.name}: bytes \d+:\d+ of stage\d.weight"):
        load(path, world)


@pytest.mark.parametrize("stage", [0, 1])
def test_deleting_all_files_of_a_stage_invalidates(saved: tuple[Path, World], stage: int) -> None:
    path, world = saved
    for rank in (2 * stage, 2 * stage + 1):
        for file in path.glob(f"*-r{rank:05d}*"):
            file.unlink()
    found = inspect(path)
    assert not found.valid and f"rank-r{2 * stage:05d}.json: missing" in found.reason
    with pytest.raises(CheckpointInvalid, match="missing"):
        load(path, world)


def test_deleting_or_truncating_any_file_but_the_seal_invalidates(saved: tuple[Path, World]) -> None:
    path, _ = saved
    for file in sorted(path.iterdir()):
        pristine = file.read_bytes()
        for size_bytes in (None, 0, 5, len(pristine) - 1):
            if size_bytes is None:
                file.unlink()
            else:
                os.truncate(file, size_bytes)
            found = inspect(path)
            if file.name == "SEALED":
                assert found.valid and not found.sealed
            elif len(pristine) == 4096 and size_bytes is None and "stage" not in str(found.damage):
                # a shard without a tensor: nothing is lost, but a message names it
                assert file.name in " ".join((found.reason, *found.damage))
            else:
                assert not found.valid and file.name in found.reason, (file.name, size_bytes, found)
            file.write_bytes(pristine)


def test_a_file_that_is_cut_off_while_it_is_loaded_is_a_typed_error_and_no_signal(tmp_path: Path) -> None:
    """The file was whole, and in the page cache, when the manifests were compared with it."""
    world = replicated(2, {"a": random_array((1024, 1024), "float32", 1)})
    save(tmp_path, world, save_id(), copies=2)
    path = tmp_path / save_id().directory()
    first, second = sorted(path.glob("shard-*"))
    state = world.state(0, empty=True)
    with opened(path) as source:
        os.truncate(first, first.stat().st_size // 2)
        assert any("ends at byte" in line for line in load_into(source, state.targets()).healed)
        world.check(state)
        os.truncate(second, second.stat().st_size // 2)
        with pytest.raises(CheckpointInvalid, match=r"no intact copy of a.*ends at byte"):
            load_into(source, state.targets())


def _swap_shards(path: Path, other: Path) -> None:
    for file in other.glob("shard-*"):
        shutil.copy(file, path / file.name)


def _swap_manifests(path: Path, other: Path) -> None:
    shutil.copy(other / "rank-r00001.json", path / "rank-r00001.json")


def _swap_catalogue(path: Path, other: Path) -> None:
    data = (other / "catalogue.json").read_bytes()
    assert data == (path / "catalogue.json").read_bytes()
    shutil.copy(other.parent / "foreign" / "catalogue.json", path / "catalogue.json")


@pytest.mark.parametrize("swap", [_swap_shards, _swap_manifests, _swap_catalogue])
def test_files_of_another_attempt_are_refused(
    saved: tuple[Path, World], swap: Callable[[Path, Path], None]
) -> None:
    """The other save has the same run, step and layout: the sizes match, the content does not."""
    path, world = saved
    save(path.parent, world, save_id(attempt=1))
    save(path.parent, pipeline(edge=32), save_id(run="foreign"))
    (path.parent / save_id(run="foreign").directory()).rename(path.parent / "foreign")
    swap(path, path.parent / save_id(attempt=1).directory())
    assert not inspect(path).valid
    with pytest.raises(CheckpointInvalid):
        load(path, world)


def test_a_renamed_attempt_is_refused_but_a_copy_elsewhere_is_fine(saved: tuple[Path, World]) -> None:
    path, world = saved
    shutil.copytree(path, path.parent / "best")
    assert inspect(path.parent / "best", deep=True).valid
    load(path.parent / "best", world)
    path.rename(path.parent / save_id(step=13).directory())
    found = inspect(path.parent / save_id(step=13).directory())
    assert not found.valid and "belongs to another save" in found.reason


def test_leftovers_do_not_matter(saved: tuple[Path, World]) -> None:
    path, world = saved
    (path / ".tmp-r00000-shard-r00000-000.safetensors").write_bytes(b"half")
    (path / "notes.txt").write_text("mine")
    assert inspect(path, deep=True).damage == ()
    load(path, world)


def test_a_missing_seal_is_only_a_missing_cache(saved: tuple[Path, World]) -> None:
    path, world = saved
    (path / "SEALED").unlink()
    found = inspect(path, deep=True)
    assert found.valid and not found.sealed
    load(path, world)


def test_an_unfinished_attempt_is_invalid(tmp_path: Path) -> None:
    world = pipeline()
    save(tmp_path, world, save_id())
    path = tmp_path / save_id().directory()
    (path / "rank-r00003.json").unlink()
    found = inspect(path)
    assert not found.valid and "rank 3 did not finish" in found.reason and found.step == 12
    assert not found.unfinished, "a seal says that it was whole once"
    (path / SEAL_NAME).unlink()
    assert inspect(path).unfinished
    for left in path.iterdir():
        left.unlink()
    assert inspect(path).unfinished, "no rank came further than the directory"


def test_a_bad_extent_is_healed_from_the_other_copy(tmp_path: Path) -> None:
    world = replicated(2, {"w": random_array((3000, 1000), "float32", 1), "b": np.arange(100.0)})
    save(tmp_path, world, save_id(), copies=2)
    path = tmp_path / save_id().directory()
    shards = sorted(path.glob("shard-*"))
    assert sum(p.stat().st_size for p in shards) >= 2 * 12_000_000
    flip(shards[0], shards[0].stat().st_size - 1000)
    found = inspect(path, deep=True)
    assert found.valid and len(found.damage) == 1 and shards[0].name in found.damage[0]
    state = NumpyState.whole({f: np.zeros_like(a) for f, a in world.arrays.items()})
    report = load_into(path, state.targets())
    world.check(state)
    assert len(report.healed) == 1 and shards[0].name in report.healed[0]
    shards[0].unlink()
    assert shards[0].name in inspect(path).damage[0]
    load(path, world)
    for shard in shards:
        if shard.exists():
            flip(shard, shard.stat().st_size - 1000)
    with pytest.raises(CheckpointInvalid, match="no intact copy of"):
        load(path, world)


def test_what_is_judged_valid_loads_wherever_two_extents_are_bad(tmp_path: Path) -> None:
    """The copies are cut into different extents: intact parts of one copy repair a damaged extent of another."""
    world = replicated(3, {"w": random_array((3, 140_000), "float64", 1)})
    save(tmp_path, world, save_id(), copies=2)
    path = tmp_path / save_id().directory()
    with opened(path) as source:
        boxes = source.index.boxes["w"]
    assert {box.record.box.sizes[0] for box in boxes} == {1, 2}, "no box is the copy of another"
    extents = [(box, start) for box in boxes for start, _, _ in box.extents()]
    answers: set[bool] = set()
    for (one, here), (other, there) in combinations(extents, 2):
        for box, start in ((one, here), (other, there)):
            flip(path / box.name, start)
        valid = inspect(path, deep=True).valid
        answers.add(valid)
        if valid:
            state = world.state(0, empty=True)
            load_into(path, state.targets())
            world.check(state)
        else:
            with pytest.raises(CheckpointInvalid, match="no intact copy of w"):
                load_into(path, world.state(0, empty=True).targets())
        for box, start in ((one, here), (other, there)):
            flip(path / box.name, start)
    assert answers == {True, False}


def test_two_bad_copies_of_one_extent_are_fatal(tmp_path: Path) -> None:
    world = replicated(2, {"b": np.arange(100.0)})
    save(tmp_path, world, save_id(), copies=2)
    path = tmp_path / save_id().directory()
    for shard in path.glob("shard-*"):
        flip(shard, shard.stat().st_size - 1)
    found = inspect(path, deep=True)
    assert not found.valid and "no intact copy of b[0:100]" in found.reason
    with pytest.raises(CheckpointInvalid, match="do not match their digest"):
        load(path, world)


def test_saving_the_same_again_heals_what_was_damaged_meanwhile(saved: tuple[Path, World]) -> None:
    """A save must check the share itself: an existing manifest does not prove that its share is intact."""
    path, world = saved
    before = {p.name: p.read_bytes() for p in path.iterdir()}
    for file in path.glob("shard-*"):
        flip(file, file.stat().st_size - 1)
    assert not inspect(path, deep=True).valid
    assert save(path.parent, world, save_id())[-1].sealed
    assert {p.name: p.read_bytes() for p in path.iterdir()} == before
    flip(path / "rank-r00001.json", 300)
    with pytest.raises(StoreWriteError, match=r"rank-r00001\.json: digest does not match"):
        save(path.parent, world, save_id())
