"""Merge, repair, save policies and the ckpt commands on real checkpoints."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
import tracemalloc
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest

from holdfast.cli.main import answer
from holdfast.errors import CheckpointInvalid, UsageError
from holdfast.frameworks.common.numpy_state import NumpyState
from holdfast.store.format.safetensors_codec import decode_header
from holdfast.store.layouts.layout import Box, Catalogue, RankLayout, TensorMeta
from holdfast.store.layouts.save_plan import plan
from holdfast.store.manage import checkpoint_tools
from holdfast.store.manage.checkpoint_root import Root
from holdfast.store.manage.checkpoint_tools import holdings, merge
from holdfast.store.manage.retention import KeepEvery, KeepFor, best_interval_s, retention
from holdfast.store.read.validation import inspect
from holdfast.store.write.writer import write_share
from tests.store.limits import halting
from tests.store.test_damage import flip
from tests.store.worlds import World, grid, pipeline, random_array, replicated, save, save_id

ARRAYS = {
    "w": random_array((40, 30), "float32", 1),
    "deep": random_array((1, 9, 500), "float64", 2),
    "s": np.array(5, np.int64),
    "e": np.zeros((0, 3), np.int16),
}


def sharded(tmp_path: Path) -> tuple[Path, World]:
    """Save a job of three ranks: one tensor cut by rows, the others whole on all ranks. Return its path and the job."""
    world = World(3, dict(ARRAYS), [[] for _ in range(3)])
    for rank in range(3):
        whole = [(f, grid(a.shape, {})[0]) for f, a in ARRAYS.items() if f != "w"]
        world.held[rank] = [("w", grid((40, 30), {0: 3})[rank]), *whole]
    save(tmp_path, world, save_id())
    return tmp_path / save_id().directory(), world


def contents(path: Path) -> dict[str, bytes]:
    """Return the bytes of each tensor of a safetensors file."""
    data = path.read_bytes()
    return {t.fqn: data[t.start : t.stop] for t in decode_header(data, len(data), str(path)).tensors}


@pytest.mark.parametrize("slab_size_bytes", [100, 10_000, 2**26])
def test_merge_gives_the_whole_tensors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, slab_size_bytes: int
) -> None:
    monkeypatch.setattr(checkpoint_tools, "SLAB_SIZE_BYTES", slab_size_bytes)
    path, world = sharded(tmp_path)
    done: list[int] = []
    assert merge(path, tmp_path / "one.safetensors", progress=done.append) == (
        str(tmp_path / "one.safetensors"),
    )
    assert contents(tmp_path / "one.safetensors") == {f: a.tobytes() for f, a in world.arrays.items()}
    assert sum(done) == sum(a.nbytes for a in world.arrays.values())
    with pytest.raises(UsageError, match="exists"):
        merge(path, tmp_path / "one.safetensors")


def test_merge_into_several_files_with_an_index(tmp_path: Path) -> None:
    path, world = sharded(tmp_path)
    made = merge(path, tmp_path / "hf", file_size_bytes_max=20_000)
    index = json.loads((tmp_path / "hf" / checkpoint_tools.INDEX_NAME).read_text())
    assert set(index["weight_map"]) == set(world.arrays) and len(made) == 3
    for fqn, name in index["weight_map"].items():
        assert contents(tmp_path / "hf" / name)[fqn] == world.arrays[fqn].tobytes()


MERGE = """
from pathlib import Path
from holdfast.store.manage.checkpoint_tools import merge
merge(Path(sys.argv[1]), Path(sys.argv[2]), file_size_bytes_max=int(sys.argv[3]))
"""


@pytest.mark.processes
@pytest.mark.parametrize("size_bytes_max", [0, 20_000])
def test_of_two_merges_into_one_target_one_is_refused(tmp_path: Path, size_bytes_max: int) -> None:
    worlds = [replicated(1, {"w": random_array((300, 30), "float32", seed)}) for seed in (1, 2)]
    for world, step in zip(worlds, (1, 2), strict=True):
        save(tmp_path / "root", world, save_id(step))
    target = tmp_path / "target"
    attempts = [tmp_path / "root" / save_id(step).directory() for step in (1, 2)]
    with (
        halting(MERGE, attempts[0], target, size_bytes_max) as first,
        halting(MERGE, attempts[1], target, size_bytes_max) as second,
    ):
        ends = [first.go_on(), second.go_on()]
    assert [code for code, _ in ends] == [0, 1]
    assert "StoreWriteError" in ends[1][1] and "already: choose another name" in ends[1][1]
    file = target / "model.safetensors" if size_bytes_max else target
    assert contents(file)["w"] == worlds[0].arrays["w"].tobytes()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["root", "target"]


NO_LINKS = """
import errno, sys
from pathlib import Path
from holdfast.store.backends.durable_files import Directory
from holdfast.store.manage.checkpoint_tools import merge

def refuse(event, _arguments):
    if event == "os.link":
        raise PermissionError(errno.EPERM, "Operation not permitted")

sys.addaudithook(refuse)
merge(Path(sys.argv[1]), Path(sys.argv[2]))
with Directory.open(Path(sys.argv[2]).parent) as directory, directory.temporary("one", "again", replace=False):
    pass
"""


@pytest.mark.processes
def test_a_file_system_without_hard_links(tmp_path: Path) -> None:
    """An audit hook raises the error of FAT, because a test cannot mount such a file system."""
    path, world = sharded(tmp_path)
    command = [sys.executable, "-c", NO_LINKS, str(path), str(tmp_path / "one")]
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    assert "StoreWriteError" in done.stderr and "one: File exists" in done.stderr
    assert contents(tmp_path / "one") == {f: a.tobytes() for f, a in world.arrays.items()}
    assert sorted(p.name for p in tmp_path.iterdir()) == ["one", path.name]


def test_merge_of_a_damaged_checkpoint_leaves_nothing(tmp_path: Path) -> None:
    path, _ = sharded(tmp_path)
    shard = next(p for p in sorted(path.glob("shard-*")) if p.stat().st_size > 4200)
    flip(shard, shard.stat().st_size - 1)
    with pytest.raises(CheckpointInvalid, match=shard.name):
        merge(path, tmp_path / "one.safetensors")
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


def test_holdings_name_the_redundancy_groups(tmp_path: Path) -> None:
    save(tmp_path, pipeline(), save_id())
    found = {(h.fqn, h.ranks) for h in holdings(tmp_path / save_id().directory())}
    assert found == {("stage0.weight", (0, 1)), ("stage1.weight", (2, 3)), ("step", (0, 1, 2, 3))}
    assert [h.fqn for h in holdings(tmp_path / save_id().directory(), "st*1.*")] == ["stage1.weight"]


@pytest.mark.more
def test_a_catalogue_that_says_millions_of_holders_takes_no_memory_for_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """300 KB of catalogue: 300 tensors of 2049 boxes; rank 0 holds everything, 2048 ranks hold a part of each."""
    names, parts = [f"w{n:03d}" for n in range(300)], 2048
    state = NumpyState.whole({name: np.zeros(parts, np.uint8) for name in names})
    layouts = {0: state.layout(0, parts + 1)}
    for rank in range(1, parts + 1):
        box = Box((rank - 1,), (1,))
        layouts[rank] = RankLayout(
            rank, tuple(TensorMeta(name, "U8", (parts,), box) for name in names), parts + 1
        )
    catalogue = Catalogue.from_layouts(layouts)
    write_share(tmp_path, save_id(), catalogue, plan(catalogue, frozenset({0})), 0, state, {}, {})
    path = tmp_path / save_id().directory()
    tracemalloc.start()
    try:
        assert sum(len(one.ranks) for one in holdings(path)) == 300 * 2049
        assert tracemalloc.get_traced_memory()[1] < 30e6
    finally:
        tracemalloc.stop()
    assert answer(["ckpt", "holders", str(path), "w00[0-4]"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 10_002 and "narrower PATTERN" in lines[-1]
    assert answer(["ckpt", "holders", str(path), "w001", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)) == 2049


def test_retention_keeps_the_newest_and_one_per_distance(tmp_path: Path) -> None:
    for step in (5, 10, 15, 20, 25, 30):
        save(tmp_path, pipeline(edge=4), save_id(step))
    Root(tmp_path).prune([2, KeepEvery(10)])
    assert [v.step for v in Root(tmp_path).list()] == [30, 25, 20, 10, 5]


def test_retention_by_age_keeps_the_young_and_always_the_newest(tmp_path: Path) -> None:
    for hours, step in ((9, 10), (5, 20), (3, 30)):
        save(tmp_path, pipeline(edge=4), save_id(step))
        then_s = time.time() - 3600 * hours
        os.utime(tmp_path / save_id(step).directory(), (then_s, then_s))
    assert answer(["ckpt", "prune", str(tmp_path), "--keep", "1", "--hours", "6"]) == 0
    assert [v.step for v in Root(tmp_path).list()] == [30, 20]
    Root(tmp_path).prune(timedelta(hours=2))
    assert [v.step for v in Root(tmp_path).list()] == [30]


@pytest.mark.parametrize(
    "given", [0, True, "3", timedelta(0), [2, None], lambda: KeepEvery(0), lambda: KeepFor(0)]
)
def test_retention_that_means_nothing_is_refused(given: object) -> None:
    with pytest.raises(UsageError):
        retention(given() if callable(given) else given)


def test_youngs_interval() -> None:
    assert math.isclose(best_interval_s(0.5, 3600), 60)
    with pytest.raises(UsageError):
        best_interval_s(0, 3600)


def run(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, str, str]:
    """Run one ``holdfast ckpt`` command. Return exit code, output and errors."""
    code = answer(["ckpt", *args])
    printed = capsys.readouterr()
    return code, printed.out, printed.err


def test_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = tmp_path / "root"
    for step in (10, 20):
        save(root, pipeline(edge=4), save_id(step))
    shard = root / save_id(20).directory() / "shard-r00000-000.safetensors"
    code, out, _ = run(capsys, "ls", str(root))
    assert code == 0 and out.count("sealed") == 2 and save_id(20).directory() in out
    code, out, _ = run(capsys, "show", f"{root}@10")
    assert code == 0 and "stage1.weight" in out and "step 10, sealed, 4 ranks" in out
    assert json.loads(run(capsys, "show", str(root), "--json")[1])["checkpoint"]["step"] == 20
    code, out, _ = run(capsys, "verify", str(root))
    assert code == 0 and "3 tensors" in out
    code, out, _ = run(capsys, "holders", str(root), "stage0*")
    assert code == 0 and "0-1" in out
    assert json.loads(run(capsys, "holders", str(root), "step", "--json")[1])[0]["ranks"] == [0, 1, 2, 3]
    assert run(capsys, "repair", str(root))[0] == 0
    code, out, _ = run(capsys, "merge", str(root), str(tmp_path / "all.safetensors"))
    assert code == 0 and "stage0.weight" in contents(tmp_path / "all.safetensors")
    flip(shard, shard.stat().st_size - 1)
    code, _, err = run(capsys, "verify", str(shard.parent))
    assert code == 3 and shard.name in err and "next: holdfast ckpt repair --dry-run" in err
    assert json.loads(run(capsys, "ls", str(root), "--deep", "--json")[1])[0]["valid"] is False
    code, _, err = run(capsys, "repair", str(shard.parent))
    assert code == 3 and "next: it cannot be rebuilt; another one: holdfast ckpt ls" in err
    code, out, _ = run(capsys, "prune", str(root), "--keep", "1", "--dry-run")
    assert code == 0 and "would remove" in out and len(Root(root).names()) == 2
    code, out, _ = run(capsys, "prune", str(root), "--keep", "1")
    assert code == 0 and len(Root(root).names()) == 1


def test_commands_name_what_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "show", str(tmp_path / "nowhere"))[0] == 2
    code, _, err = run(capsys, "verify", str(tmp_path))
    assert code == 3 and "no valid checkpoint" in err
    assert run(capsys, "prune", str(tmp_path), "--keep", "0")[0] == 2
    assert inspect(tmp_path / "nowhere").reason.endswith("does not exist")


def test_what_is_not_there_or_not_finished_is_called_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for command in (["ls"], ["prune", "--keep", "1"]):
        code, _, err = run(capsys, command[0], str(tmp_path / "nope"), *command[1:])
        assert code == 2 and "nope does not exist" in err and "next: " in err
    (tmp_path / save_id(10).directory()).mkdir()
    out = run(capsys, "ls", str(tmp_path))[1]
    assert "unfinished" in out and "invalid" not in out
    (line,) = [line for line in out.splitlines() if "no rank has finished" in line]
    assert line.startswith("10") and str(tmp_path) in line, "nothing is wrapped into a pipe"
