"""The choice of the newest valid checkpoint, and pruning."""

from __future__ import annotations

import errno
import os
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from holdfast.errors import CheckpointInvalid, NothingToResume, StoreError, StoreUnreachable, UsageError
from holdfast.store.backends.durable_files import Directory, make_root
from holdfast.store.backends.local_store import LocalStore
from holdfast.store.backends.registry import open_store
from holdfast.store.manage.checkpoint_root import Root, resolve
from holdfast.store.read.validation import Validity, inspect
from tests.store.worlds import pipeline, replicated, save, save_id

WORLD = pipeline(edge=8)


def wreck(root: Path, step: int, age_s: float = 0.0, *, run: str = "run", n: int = 1) -> Path:
    """Write a save whose last rank never finished. Return its path."""
    save(root, WORLD, save_id(step, run=run, n=n))
    path = root / save_id(step, run=run, n=n).directory()
    (path / "SEALED").unlink()
    (path / "rank-r00003.json").unlink()
    os.utime(path, (time.time() - age_s, time.time() - age_s))
    return path


def test_newest_valid_and_the_reason_of_each_rejected_one(tmp_path: Path) -> None:
    for step in (10, 20):
        save(tmp_path, WORLD, save_id(step))
    wreck(tmp_path, 30)
    (tmp_path / "step-00000040.run.g1.1.a0").mkdir()
    (tmp_path / "step-99999999.notours").mkdir()
    choice = Root(tmp_path).newest_valid()
    assert choice.require().step == 20
    assert [v.step for v in choice.rejected] == [40, 30]
    assert "no rank has finished its share" in choice.rejected[0].reason
    assert "rank 3 did not finish" in choice.rejected[1].reason
    assert Root(tmp_path).newest_valid(at=10).require().step == 10
    with pytest.raises(NothingToResume, match=r"rank-r00003.json: missing"):
        Root(tmp_path).newest_valid(at=30).require()


def test_a_checkpoint_that_a_newer_one_replaces_while_the_root_is_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The newest save is unfinished when it is inspected. The save before it is then removed by a newer one."""
    save(tmp_path, WORLD, save_id(1))
    unfinished = wreck(tmp_path, 2)
    swapped: list[Path] = []

    def look(path: Path, deep: bool) -> Validity:
        found = inspect(path, deep)
        if not swapped:
            swapped.append(path)
            shutil.rmtree(unfinished)
            save(tmp_path, WORLD, save_id(2))
            shutil.rmtree(tmp_path / save_id(1).directory())
        return found

    monkeypatch.setattr("holdfast.store.manage.checkpoint_root.inspect", look)
    assert Root(tmp_path).newest_valid().require().step == 2


def test_order_is_step_then_generation_then_attempt(tmp_path: Path) -> None:
    for identity in (save_id(20, 0, n=2), save_id(20, 1, n=2), save_id(20, 5, n=1), save_id(9, 9, n=9)):
        save(tmp_path, WORLD, identity)
    assert [(v.step, str(v.save_id)) for v in Root(tmp_path).list()] == [
        (20, "run.g1.2.a1"), (20, "run.g1.2.a0"), (20, "run.g1.1.a5"), (9, "run.g1.9.a9"),
    ]  # fmt: skip


def test_runs_share_a_root_without_mixing(tmp_path: Path) -> None:
    save(tmp_path, WORLD, save_id(10, run="old"))
    save(tmp_path, WORLD, save_id(5, run="new"))
    assert Root(tmp_path).newest_valid(run="new").require().step == 5
    assert Root(tmp_path).newest_valid().require().step == 10


def test_an_empty_or_missing_root_is_a_typed_error(tmp_path: Path) -> None:
    for root in (tmp_path, tmp_path / "missing"):
        with pytest.raises(NothingToResume, match="no attempt at all"):
            Root(root).newest_valid().require()
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointInvalid, match="not a directory"):
        Root(tmp_path / "file").newest_valid()


def test_prune_keeps_the_newest_valid_ones_and_young_wrecks(tmp_path: Path) -> None:
    for step in (10, 20, 30):
        save(tmp_path, WORLD, save_id(step))
    wreck(tmp_path, 5, age_s=10_000)
    young = wreck(tmp_path, 40)
    root = Root(tmp_path)
    plan = root.prune(2, dry_run=True)
    assert len(root.names()) == 5
    done = root.prune(2)
    assert done.removed == plan.removed == (save_id(10).directory(), save_id(5).directory())
    assert list(done.spared) == [young.name]
    assert [v.step for v in root.list() if v.valid] == [30, 20]
    assert root.prune(1, grace_s=0).removed == (young.name, save_id(20).directory())
    assert [v.step for v in root.list()] == [30]
    with pytest.raises(UsageError, match="keep=0"):
        root.prune(0)


def test_pruning_says_whether_what_stays_is_unfinished_or_damaged(tmp_path: Path) -> None:
    """Regression: a damaged checkpoint was spared as "unfinished", which hid that a repair may be possible."""
    for step in (10, 20):
        save(tmp_path, WORLD, save_id(step))
    young = wreck(tmp_path, 30)
    damaged = tmp_path / save_id(20).directory()
    (shard,) = damaged.glob("*r00001*.safetensors")
    shard.unlink()
    spared = Root(tmp_path).prune(1).spared
    assert spared[young.name] == "unfinished, and younger than 3600 s"
    assert (
        spared[damaged.name].startswith("damaged (")
        and f"{shard.name}: does not exist" in spared[damaged.name]
    )


def test_a_wreck_that_its_run_is_past_is_pruned_at_once(tmp_path: Path) -> None:
    past = wreck(tmp_path, 5)
    young = [wreck(tmp_path, 40), wreck(tmp_path, 6, run="other"), wreck(tmp_path, 7, n=2)]
    save(tmp_path, WORLD, save_id(10))
    assert Root(tmp_path).prune(1).removed == (past.name,)
    assert {v.name for v in Root(tmp_path).list() if not v.valid} == {path.name for path in young}


def test_a_failed_attempt_is_discarded_unless_it_is_in_use_or_valid(tmp_path: Path) -> None:
    path = wreck(tmp_path, 5)
    save(tmp_path, WORLD, save_id(10))
    root = Root(tmp_path)
    with Directory.open(path) as writer:
        assert writer.lock(shared=True)
        assert not root.discard(save_id(5)) and path.is_dir()
    assert root.discard(save_id(5)) and not path.exists()
    assert root.discard(save_id(5)), "twice is harmless"
    assert root.discard(save_id(10)) and root.newest_valid().require().step == 10


def test_prune_never_removes_the_last_valid_one_nor_anything_without_one(tmp_path: Path) -> None:
    save(tmp_path, WORLD, save_id(10))
    assert Root(tmp_path).prune(lambda _valid, _age_s: set(), grace_s=0).removed == ()
    (tmp_path / save_id(10).directory() / "rank-r00000.json").unlink()
    done = Root(tmp_path).prune(1, grace_s=0)
    assert done.removed == () and "no valid checkpoint exists" in done.spared.values()


def test_prune_spares_what_is_being_read_and_finishes_interrupted_removals(tmp_path: Path) -> None:
    for step in (10, 20):
        save(tmp_path, WORLD, save_id(step))
    (tmp_path / f".removing-{save_id(1).directory()}").mkdir()
    with Directory.open(tmp_path / save_id(10).directory()) as reader:
        assert reader.lock(shared=True)
        assert Root(tmp_path).prune(1).spared == {save_id(10).directory(): "is being read or written"}
    assert Root(tmp_path).prune(1).removed == (save_id(10).directory(),)
    assert [p.name for p in tmp_path.iterdir()] == [save_id(20).directory()]


def test_an_interrupted_removal_is_not_in_the_way_of_the_next_one_of_that_name(tmp_path: Path) -> None:
    """Regression: after an import failed, was removed and was made again, nothing could be pruned in this root."""
    left = tmp_path / f".removing-{save_id(5).directory()}"
    left.mkdir()
    (left / "shard-r00000-000.safetensors").touch()
    wreck(tmp_path, 5)
    save(tmp_path, WORLD, save_id(10))
    assert Root(tmp_path).prune(1, grace_s=0).removed == (save_id(5).directory(),)
    assert [p.name for p in tmp_path.iterdir()] == [save_id(10).directory()]


def test_nobody_holds_what_has_been_removed(tmp_path: Path) -> None:
    """Regression: a writer opened the save before the removal and locked it after.

    Its data was lost, but reported as sealed.
    """
    store, name = LocalStore(tmp_path), save_id(5).directory()
    with store.create(name) as writer:
        assert store.remove(name)
        assert not writer.hold()
        with store.create(name) as other:
            assert other.hold() and not writer.hold()


def test_prune_spares_what_is_being_verified(tmp_path: Path) -> None:
    """A complete read takes long. Meanwhile a job continues to save and to prune."""
    for step in (10, 20):
        save(tmp_path, WORLD, save_id(step))
    root = Root(tmp_path)
    spared: list[dict[str, str]] = []
    path = tmp_path / save_id(10).directory()
    found = inspect(path, deep=True, progress=lambda _: spared.append(root.prune(1).spared))
    assert found.valid, found.reason
    assert {tuple(each.items()) for each in spared} == {((path.name, "is being read or written"),)}
    assert root.prune(1).removed == (path.name,)


def test_an_attempt_whose_age_cannot_be_asked_is_a_typed_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (10, 20):
        save(tmp_path, WORLD, save_id(step))
    store = LocalStore(tmp_path)
    assert 0 <= store.age_s(save_id(10).directory()) < 60 and store.age_s("gone") == float("inf")

    def stale(_path: object) -> os.stat_result:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    with monkeypatch.context() as patched, pytest.raises(StoreUnreachable, match="Stale file handle"):
        patched.setattr("holdfast.store.backends.local_store.os.stat", stale)
        store.age_s(save_id(10).directory())


def test_resolve_path_and_step(tmp_path: Path) -> None:
    for step in (10, 20):
        save(tmp_path, WORLD, save_id(step))
    assert resolve(str(tmp_path)).name == save_id(20).directory()
    assert resolve(f"{tmp_path}@10").name == save_id(10).directory()
    assert resolve(str(tmp_path / save_id(10).directory())).name == save_id(10).directory()
    with pytest.raises(NothingToResume, match="no valid checkpoint"):
        resolve(f"{tmp_path}@11")
    with pytest.raises(UsageError, match="not a step number"):
        resolve(f"{tmp_path}@last")
    with pytest.raises(UsageError, match="does not exist"):
        resolve(str(tmp_path / "nowhere"))


def test_files_are_private(tmp_path: Path) -> None:
    root = tmp_path / "new" / "root"
    old = os.umask(0o022)
    try:
        open_store(root).probe()
        assert list(root.iterdir()) == []
        save(root, replicated(1, WORLD.arrays), save_id())
        save(tmp_path / "other", replicated(1, WORLD.arrays), save_id())
    finally:
        os.umask(old)
    path = root / save_id().directory()
    for directory in (root, path, tmp_path / "other"):
        assert directory.stat().st_mode & 0o777 == 0o700
    assert root.parent.stat().st_mode & 0o777 == 0o755, "what is above may serve others"
    assert {p.stat().st_mode & 0o777 for p in path.iterdir()} == {0o600}


def test_many_try_a_root_at_the_same_time(tmp_path: Path) -> None:
    """All processes have the same id, as those of two containers that share the directory may have."""

    def probe(_: int) -> None:
        open_store(tmp_path / "root").probe()

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(probe, range(2000)))
    assert list((tmp_path / "root").iterdir()) == []


def test_names_cannot_leave_the_directory(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    with Directory.open(tmp_path / "in") as directory:
        for name in ("../x", "/etc/passwd", "a/b", "..", "", "x" * 300, "a\0b"):
            with pytest.raises(StoreError, match="not a file name"):
                directory.open_read(name)


def test_a_root_that_was_missing_is_durable_with_its_parents(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: only the directory of the checkpoint was synced, so a power loss could take the whole root."""
    synced: list[str] = []
    fsync = os.fsync

    def recording(fd: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{fd}"))
        fsync(fd)

    monkeypatch.setattr(os, "fsync", recording)
    make_root(tmp_path / "of" / "a" / "project")
    assert set(synced) == {str(tmp_path), str(tmp_path / "of"), str(tmp_path / "of" / "a")}
    synced.clear()
    make_root(tmp_path / "of" / "a" / "project")
    assert not synced
