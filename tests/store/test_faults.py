"""Faults of the machine while saving: killed at every sync, disk full, read-only, file size limit."""

from __future__ import annotations

import resource
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest

from holdfast.errors import StoreWriteError
from holdfast.store.manage.checkpoint_root import Root
from holdfast.store.read.load import load_into
from holdfast.store.read.validation import inspect
from tests.store.worlds import pipeline, random_array, replicated, save, save_id

pytestmark = pytest.mark.processes

KILLED_WRITER = """
import os, signal, sys
from pathlib import Path
from tests.store.worlds import pipeline, save, save_id

call, kill_before, root = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
original, calls = getattr(os, call), 0

def counted(*args, **kwargs):
    global calls
    calls += 1
    if calls == kill_before:
        os.kill(os.getpid(), signal.SIGKILL)
    return original(*args, **kwargs)

setattr(os, call, counted)
save(root, pipeline(stages=1, edge=16), save_id(2))
print(calls)
"""


def run_writer(root: Path, call: str, kill_before: int) -> tuple[int, str]:
    """Save step 2 in another process that is killed before its n-th system call of one kind.

    Return exit code and output.
    """
    done = subprocess.run(
        [sys.executable, "-c", KILLED_WRITER, call, str(kill_before), str(root)],
        cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode in (0, -signal.SIGKILL), done.stderr
    return done.returncode, done.stdout.strip()


def test_killed_at_every_sync_rename_and_write_leaves_old_or_new(tmp_path: Path) -> None:
    """After SIGKILL at any point, the newest valid state is step 1 or exactly step 2.

    The next save completes step 2.
    """
    world = pipeline(stages=1, edge=16)
    outcomes = set()
    for call in ("fsync", "rename", "pwrite"):
        (tmp_path / call).mkdir()  # as below, where a save has made the root
        code, printed = run_writer(tmp_path / call, call, 0)
        assert code == 0 and int(printed) >= 5
        total = int(printed)
        for number in sorted({1, 2, 3, total // 2, total - 3, total - 2, total - 1, total}):
            root = tmp_path / f"{call}-{number}"
            save(root, world, save_id(1))
            code, _ = run_writer(root, call, number)
            assert code == -signal.SIGKILL
            newest = Root(root).newest_valid(deep=True).require()
            outcomes.add(newest.step)
            state = world.state(0, empty=True)
            load_into(newest.path, state.targets())
            world.check(state)
            assert save(root, world, save_id(2))[-1].sealed, "a later attempt of the same save completes it"
            assert Root(root).newest_valid(deep=True).require().step == 2
    assert outcomes == {1, 2}


def test_a_full_disk_is_a_typed_error_and_nothing_valid_appears(tiny_disk: Path) -> None:
    save(tiny_disk, pipeline(edge=16), save_id(1))
    world = replicated(2, {"w": random_array((1000, 500), "float32", 1)})
    with pytest.raises(StoreWriteError, match="No space left on device") as caught:
        save(tiny_disk, world, save_id(2))
    assert "free some space" in str(caught.value)
    assert Root(tiny_disk).newest_valid(deep=True).require().step == 1
    attempt = tiny_disk / save_id(2).directory()
    assert not list(attempt.glob("rank-*")) and not list(attempt.glob(".tmp*")), (
        "the half-written file is gone"
    )


def test_a_file_size_limit_is_a_typed_error(tmp_path: Path) -> None:
    world = replicated(1, {"w": np.zeros(100_000)})
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
    try:
        with pytest.raises(StoreWriteError, match="File too large"):
            save(tmp_path, world, save_id())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)
    assert not inspect(tmp_path / save_id().directory()).valid
    assert save(tmp_path, world, save_id())[0].sealed, "with room again the same save succeeds"


READ_ONLY = """
import os, sys
from pathlib import Path
from holdfast.errors import StoreWriteError
from tests.store.worlds import pipeline, save, save_id

world = pipeline()
if os.getuid() == 0:
    os.setuid(65534)
try:
    save(Path(sys.argv[1]), world, save_id())
except StoreWriteError as error:
    print(error)
"""


def test_a_read_only_directory_is_a_typed_error() -> None:
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o555)
        done = subprocess.run(
            [sys.executable, "-c", READ_ONLY, name],
            cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
        Path(name).chmod(0o700)
    assert "cannot write" in done.stdout and "Permission denied" in done.stdout, done.stderr
    assert "make the directory writable" in done.stdout


def test_a_file_in_place_of_the_root_is_a_typed_error(tmp_path: Path) -> None:
    (tmp_path / "root").write_text("")
    with pytest.raises(StoreWriteError, match=r"File exists|Not a directory"):
        save(tmp_path / "root", pipeline(), save_id())


CONCURRENT = """
import sys
from pathlib import Path
from holdfast.store.layouts.save_plan import plan
from holdfast.store.write.writer import write_share
from tests.store.worlds import pipeline, save_id

root, rank = Path(sys.argv[1]), int(sys.argv[2])
world = pipeline()
catalogue = world.catalogue()
for step in range(10):
    shares = plan(catalogue, frozenset(range(4)))
    write_share(root, save_id(step), catalogue, shares, rank, world.state(rank), {}, {rank: {}})
"""


def test_four_processes_write_at_once_without_a_word(tmp_path: Path) -> None:
    workers = [
        subprocess.Popen(
            [sys.executable, "-c", CONCURRENT, str(tmp_path), str(rank)], cwd=Path(__file__).parents[2]
        )
        for rank in range(4)
    ]
    assert [worker.wait(60) for worker in workers] == [0] * 4
    found = Root(tmp_path).list(deep=True)
    assert [v.step for v in found] == list(reversed(range(10)))
    assert all(v.valid and v.sealed and not v.damage for v in found)
