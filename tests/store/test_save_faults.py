"""After any failure in the save of step 2, load gives exactly step 2 if it is sealed, otherwise exactly step 1."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from holdfast.core.ids import SaveId
from holdfast.errors import HoldfastError, StoreWriteError
from holdfast.store.layouts.save_plan import plan
from holdfast.store.manage.checkpoint_root import Root
from holdfast.store.read.load import load_into
from holdfast.store.read.validation import inspect
from holdfast.store.write.async_save import BackgroundSaver
from holdfast.store.write.writer import WrittenShare
from tests.store.worlds import newest_of, random_array, replicated, save, save_id, world_at

REPOSITORY = Path(__file__).parents[2]
CALLS = ("open", "mkdir", "pwrite", "fsync", "rename", "posix_fadvise")


class Failing:
    """A patch of one function of ``os``: its n-th call fails, once. Counts the calls."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, call: str, number: int, code: int) -> None:
        self.calls = 0
        real: Callable[..., Any] = getattr(os, call)

        def maybe(*args: Any, **more: Any) -> Any:
            writes = call != "open" or (len(args) > 1 and bool(args[1] & os.O_CREAT))
            self.calls += int(writes)
            if writes and self.calls == number:
                raise OSError(code, os.strerror(code))
            return real(*args, **more)

        monkeypatch.setattr(os, call, maybe)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
@pytest.mark.parametrize("call", CALLS)
def test_every_call_that_fails_is_a_typed_error_and_a_second_try_succeeds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, code: int
) -> None:
    counted = tmp_path / "counted"
    counted.mkdir()  # as below, where a save has made the root
    with monkeypatch.context() as patch:
        never = Failing(patch, call, 0, code)
        save(counted, world_at(2), save_id(2))
    assert never.calls >= 1
    for number in range(1, never.calls + 1):
        root = tmp_path / f"{call}-{number}"
        save(root, world_at(1), save_id(1))
        with monkeypatch.context() as patch:
            Failing(patch, call, number, code)
            # The creation of a root that exists may fail in any way.
            harmless = call == "mkdir" and number % 2 == 1
            with nullcontext() if harmless else pytest.raises(StoreWriteError, match="cannot write"):
                save(root, world_at(2), save_id(2))
        newest_of(root, {1, 2})
        assert not list(root.glob("*/.tmp*")), "half-written files are gone"
        assert save(root, world_at(2), save_id(2))[-1].sealed
        assert newest_of(root, {2}) == 2


class PowerLoss:
    """A simulation of power loss: the remains of a directory tree at every moment of the code that runs inside.

    Before each call that changes the tree, three copies of it are made and judged. ``least`` has only synced data: a
    file's content at its last fsync, a directory's entries at theirs. ``entries`` has all names, but only synced
    contents. ``all`` has everything. A real disk keeps something in between.
    """

    def __init__(self, root: Path, judge: Callable[[Path], None]) -> None:
        self.moments = 0
        self._striking = False
        self._root = root
        self._judge = judge
        self._contents: dict[int, bytes] = {}
        self._names: dict[str, dict[str, int]] = {}
        for path in [root, *root.rglob("*")]:
            self._synced(path)

    def watch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Patch the system calls of the store."""
        for call in ("mkdir", "pwrite", "fsync", "rename", "unlink"):
            monkeypatch.setattr(os, call, self._around(call, getattr(os, call)))

    def _around(self, call: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **more: Any) -> Any:
            self.strike()
            result = real(*args, **more)
            if call == "fsync":
                self._synced(Path(os.readlink(f"/proc/self/fd/{args[0]}")))
            return result

        return wrapped

    def _synced(self, path: Path) -> None:
        if path.is_dir():
            self._names[str(path)] = {entry.name: entry.inode() for entry in os.scandir(path)}
        else:
            self._contents[path.stat().st_ino] = path.read_bytes()

    def strike(self) -> None:
        """Lose the power now, and judge the remains."""
        if self._striking:
            return
        self._striking = True
        self.moments += 1
        for kind in ("least", "entries", "all"):
            goal = self._root.parent / "after"
            self._copy(self._root, goal, kind)
            self._judge(goal)
            shutil.rmtree(goal)
        self._striking = False

    def _copy(self, place: Path, goal: Path, kind: str) -> None:
        goal.mkdir(mode=0o700)
        now = {entry.name: entry.inode() for entry in os.scandir(place)}
        for name, inode in (self._names.get(str(place), {}) if kind == "least" else now).items():
            source = place / name
            if source.is_dir():
                self._copy(source, goal / name, kind)
            elif kind == "all":
                shutil.copyfile(source, goal / name)
            else:
                (goal / name).write_bytes(self._contents.get(inode, b""))


def test_power_lost_at_every_moment_leaves_one_exact_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "root"
    save(root, world_at(1), save_id(1))
    found: list[int] = []
    loss = PowerLoss(root, lambda after: found.append(newest_of(after, {1, 2})))
    with monkeypatch.context() as patch:
        loss.watch(patch)
        assert save(root, world_at(2), save_id(2))[-1].sealed
    assert found[0] == 1 and set(found) == {1, 2} and loss.moments >= 20
    durable = PowerLoss(root, lambda after: found.append(newest_of(after, {2})))
    durable._contents, durable._names = loss._contents, loss._names
    durable.strike()  # reported as sealed: it survives the loss of all data that was not synced
    assert found[-3:] == [2, 2, 2]


KILLED = """
import os, signal, sys
if "holdfast.store.write.writer_process" in sys.orig_argv and not os.path.exists({marker!r}):
    real, calls = os.{call}, 0
    def counted(*args, **more):
        global calls
        calls += 1
        if calls == {number}:
            open({marker!r}, "w").close()
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*args, **more)
    os.{call} = counted
"""


@pytest.mark.processes
@pytest.mark.parametrize(("call", "numbers"), [("fsync", (1, 3, 6)), ("rename", (1, 3)), ("pwrite", (2,))])
def test_a_writer_killed_at_any_step_is_replaced_and_the_save_sealed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, numbers: tuple[int, ...]
) -> None:
    world = replicated(1, {"a": random_array((30, 20), "float32", 2), "b": np.full(3, 2)})
    catalogue, state = world.catalogue(), world.state(0)
    paths = os.environ.get("PYTHONPATH", "")
    for number in numbers:
        root, marker = tmp_path / f"{number}", tmp_path / f"killed-{number}"
        site = (
            tmp_path / f"site-{number}"
        )  # otherwise Python would use the bytecode of a file of the same second and length
        site.mkdir()
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(site), paths]))
        text = KILLED.format(call=call, number=number, marker=str(marker))
        (site / "sitecustomize.py").write_text(text)
        save(root, world_at(1), save_id(1))
        results: list[WrittenShare | HoldfastError] = []
        with BackgroundSaver(lambda _id, result, to=results: to.append(result)) as saver:  # type: ignore[misc]
            saver.save(root, save_id(2), catalogue, plan(catalogue, frozenset({0})), 0, state, {}, {})
        assert marker.exists(), f"there is no call {number} of {call}"
        assert isinstance(results[0], WrittenShare) and results[0].sealed
        assert newest_of(root, {2}) == 2


RIVAL = """
import sys
from pathlib import Path
import numpy as np
from holdfast.errors import StoreWriteError
from holdfast.store.manage.checkpoint_root import Root
from tests.store.worlds import random_array, replicated, save, save_id

root, run, seed = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
for step in range(1, 13):
    world = replicated(1, {"a": random_array((300, 200), "float32", 1000 * seed + step)})
    try:
        save(root, world, save_id(step, run=run))
        Root(root).prune(4)
    except StoreWriteError as error:
        print("refused", step, error.message)
"""


def rivals(root: Path, runs: tuple[str, str]) -> list[str]:
    """Run two jobs that save into one root at the same time. Return their outputs."""
    jobs = [
        subprocess.Popen(
            [sys.executable, "-c", RIVAL, str(root), run, str(seed)], cwd=REPOSITORY, stdout=subprocess.PIPE, text=True
        )
        for seed, run in enumerate(runs)
    ]  # fmt: skip
    outputs = [job.communicate(timeout=60)[0] for job in jobs]
    assert [job.returncode for job in jobs] == [0, 0]
    return outputs


def is_of(seed: int, step: int, path: str) -> bool:
    """Return True when a checkpoint holds exactly the state of that job."""
    world = replicated(1, {"a": random_array((300, 200), "float32", 1000 * seed + step)})
    state = world.state(0, empty=True)
    load_into(path, state.targets())
    return state.shards[0].array.tobytes() == world.arrays["a"].tobytes()


@pytest.mark.processes
def test_two_jobs_in_one_root_do_not_touch_each_other(tmp_path: Path) -> None:
    assert rivals(tmp_path, ("one", "two")) == ["", ""]
    valid = [v for v in Root(tmp_path).list(deep=True) if v.valid]
    assert valid and all(v.save_id is not None for v in valid)
    for found in valid:
        assert found.save_id is not None
        assert is_of(0 if found.save_id.run == "one" else 1, found.step, found.path)


@pytest.mark.processes
def test_two_jobs_under_one_name_never_mix(tmp_path: Path) -> None:
    """A user gave two jobs the same run id and root by mistake. Each step belongs to one of the jobs, or is refused."""
    rivals(tmp_path, ("same", "same"))
    for name in Root(tmp_path).names():
        found = inspect(tmp_path / name, deep=True)
        if found.valid:
            assert is_of(0, found.step, found.path) != is_of(1, found.step, found.path)


def test_a_save_id_is_bound_to_its_content(tmp_path: Path) -> None:
    save(tmp_path, world_at(2), save_id(2))
    with pytest.raises(StoreWriteError, match="already written other content"):
        save(tmp_path, world_at(3), SaveId(save_id(2).run, save_id(2).generation, 2, 0, "periodic"))
    assert newest_of(tmp_path, {2}) == 2
