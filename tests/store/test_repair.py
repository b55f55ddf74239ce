"""State that copies allow to restore is loaded and rebuilt. Other state is refused, and nothing is changed."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from holdfast.cli.main import answer
from holdfast.errors import CheckpointInvalid
from holdfast.store.backends.location import Url
from holdfast.store.backends.s3_client import Bucket
from holdfast.store.manage.repair import repair
from holdfast.store.read.load import load_locals, load_values
from holdfast.store.read.validation import inspect
from holdfast.store.write import writer
from tests.store.limits import halting
from tests.store.test_damage import flip, load
from tests.store.worlds import World, random_array, replicated, save, save_id

ARRAYS = {
    "w": random_array((40, 300), "float32", 1),
    "deep": random_array((1, 9, 500), "float64", 2),
    "s": np.array(5, np.int64),
    "e": np.zeros((0, 3), np.int16),
}


@pytest.fixture(autouse=True)
def small_extents(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make extents small, so that each tensor has several."""
    monkeypatch.setattr(writer, "EXTENT_SIZE_BYTES", 4096)


def saved(tmp_path: Path, copies: int) -> tuple[Path, World]:
    """Save a checkpoint of three ranks that hold the same tensors."""
    world = replicated(3, ARRAYS)
    save(tmp_path, world, save_id(), copies=copies)
    return tmp_path / save_id().directory(), world


def contents(path: Path) -> dict[str, bytes]:
    """Return the contents of all files."""
    return {file.name: file.read_bytes() for file in sorted(path.iterdir())}


def shards(path: Path) -> list[Path]:
    """Return the shard files that hold ``w``."""
    found = [p for p in sorted(path.glob("shard-*")) if p.stat().st_size > 50_000]
    assert len(found) == 2
    return found


def _flip_start(file: Path) -> None:
    flip(file, 9)


def _flip_end(file: Path) -> None:
    flip(file, file.stat().st_size - 3)


def _cut(file: Path) -> None:
    os.truncate(file, file.stat().st_size - 1)


def _empty(file: Path) -> None:
    os.truncate(file, 0)


def _link(file: Path) -> None:
    file.unlink()
    file.symlink_to("/dev/zero")


@pytest.mark.parametrize("harm", [_flip_start, _flip_end, _cut, _empty, _link, Path.unlink])
def test_any_one_damaged_file_is_made_up_for_and_rebuilt(
    tmp_path: Path, harm: Callable[[Path], object]
) -> None:
    path, world = saved(tmp_path, copies=2)
    before = contents(path)
    assert repair(path).rebuilt == ()
    assert {"copy-catalogue.json", "copy-rank-r00002.json"} < before.keys()
    for name in before:
        harm(path / name)
        found = inspect(path, deep=True)
        assert found.valid and (name in " ".join(found.damage) or name == "SEALED"), name
        healed = " ".join(load(path, world))
        unread = name.startswith(("copy-", "SEALED")) or (harm is _flip_end and name.startswith("shard-"))
        assert name in healed or unread, name
        assert load_values(path) == {"step": 12} and load_locals(path, 1) == {"position": 10}
        assert repair(path).rebuilt == (name,)
        assert contents(path) == before, name


REPAIR = """
from pathlib import Path
from holdfast.store.manage.repair import repair
repair(Path(sys.argv[1]))
"""


@pytest.mark.processes
def test_two_repairs_at_once_do_not_harm_each_other(tmp_path: Path) -> None:
    path, _ = saved(tmp_path, copies=2)
    before = contents(path)
    flip(shards(path)[0], 4096)
    (path / "catalogue.json").unlink()
    with halting(REPAIR, path) as first:
        assert len(repair(path).rebuilt) == 2
        assert first.go_on() == (0, "")
    assert contents(path) == before, "also no temporary file"


def test_originals_and_shards_may_be_damaged_together(tmp_path: Path) -> None:
    path, world = saved(tmp_path, copies=2)
    before = contents(path)
    for name in ("catalogue.json", "rank-r00000.json", "copy-rank-r00001.json", "rank-r00002.json", "SEALED"):
        (path / name).write_bytes(b"gone")
    shards(path)[0].unlink()
    load(path, world)
    assert len(repair(path).rebuilt) == 6
    assert contents(path) == before


def test_extents_of_different_copies_make_up_for_each_other(tmp_path: Path) -> None:
    path, world = saved(tmp_path, copies=2)
    before = contents(path)
    one, two = shards(path)
    flip(one, one.stat().st_size - 3)
    flip(two, 4096 + 8192)
    found = inspect(path, deep=True)
    assert found.valid and len(found.damage) == 2
    load(path, world)
    assert repair(path).rebuilt == (one.name, two.name)
    assert contents(path) == before


def test_a_header_is_rebuilt_without_copies(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, world = saved(tmp_path, copies=1)
    before = contents(path)
    shard = max(path.glob("shard-*"), key=lambda p: p.stat().st_size)
    with shard.open("r+b") as file:
        file.write(bytes(4096))
    assert not inspect(path).valid
    with pytest.raises(CheckpointInvalid, match="header does not match"):
        load(path, world)
    damaged = contents(path)
    assert answer(["ckpt", "verify", str(path)]) == 3
    assert "ckpt repair --dry-run" in capsys.readouterr().err
    assert answer(["ckpt", "repair", "--dry-run", str(path)]) == 0
    assert capsys.readouterr().out == f"would rebuild {shard}\n" and contents(path) == damaged
    assert answer(["ckpt", "repair", str(path)]) == 0
    assert "valid and sealed" in capsys.readouterr().out
    assert contents(path) == before
    load(path, world)


def _same_extent(path: Path) -> None:
    for shard in shards(path):
        flip(shard, shard.stat().st_size - 3)


def _both_manifests(path: Path) -> None:
    (path / "rank-r00001.json").unlink()
    flip(path / "copy-rank-r00001.json", 300)


def _both_catalogues(path: Path) -> None:
    flip(path / "catalogue.json", 300)
    (path / "copy-catalogue.json").unlink()


@pytest.mark.parametrize("harm", [_same_extent, _both_manifests, _both_catalogues])
def test_damage_to_both_copies_is_refused_and_nothing_changes(
    tmp_path: Path, harm: Callable[[Path], None]
) -> None:
    path, world = saved(tmp_path, copies=2)
    flip(path / "SEALED", 60)  # repairable on its own
    harm(path)
    before = contents(path)
    assert not inspect(path, deep=True).valid
    for act in (lambda: load(path, world), lambda: repair(path)):
        with pytest.raises(CheckpointInvalid):
            act()
    assert contents(path) == before


@pytest.mark.parametrize("name", ["catalogue.json", "rank-r00001.json", "shard-r00000-000.safetensors"])
def test_without_copies_what_is_lost_is_refused(tmp_path: Path, name: str) -> None:
    path, _ = saved(tmp_path, copies=1)
    assert not list(path.glob("copy-*"))
    flip(path / name, (path / name).stat().st_size - 3)
    before = contents(path)
    with pytest.raises(CheckpointInvalid, match=name):
        repair(path)
    assert contents(path) == before


def test_a_copy_of_another_save_does_not_count(tmp_path: Path) -> None:
    path, world = saved(tmp_path, copies=2)
    save(tmp_path, world, save_id(step=13), copies=2)
    other = tmp_path / save_id(step=13).directory()
    (path / "copy-rank-r00001.json").write_bytes((other / "rank-r00001.json").read_bytes())
    assert "is no copy of rank-r00001.json" in inspect(path, deep=True).damage[0]
    (path / "rank-r00001.json").unlink()
    assert "belongs to another save" in inspect(path).reason
    with pytest.raises(CheckpointInvalid, match="belongs to another save"):
        load(path, world)


def test_saving_again_completes_the_copies(tmp_path: Path) -> None:
    path, world = saved(tmp_path, copies=2)
    before = contents(path)
    (path / "copy-rank-r00001.json").unlink()
    (path / "copy-catalogue.json").unlink()
    save(tmp_path, world, save_id(), copies=2)
    assert contents(path) == before


def test_in_a_bucket(bucket: Url) -> None:
    world = replicated(3, ARRAYS)
    save(bucket, world, save_id(), copies=2)
    place, name = bucket / save_id().directory(), save_id().directory()
    objects = Bucket(bucket)
    before = {entry.key: bytes(objects.get(f"{name}/{entry.key}")) for entry in objects.entries(name)}
    shard = next(key for key, data in before.items() if len(data) > 50_000)
    objects.put(f"{name}/{shard}", before[shard][:-1])
    objects.put(f"{name}/catalogue.json", b"gone")
    objects.delete([f"{name}/rank-r00001.json"])
    healed = " ".join(load(place, world))
    assert all(key in healed for key in (shard, "catalogue.json", "rank-r00001.json"))
    assert set(repair(place).rebuilt) == {shard, "catalogue.json", "rank-r00001.json"}
    assert {e.key: bytes(objects.get(f"{name}/{e.key}")) for e in objects.entries(name)} == before
