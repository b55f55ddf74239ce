"""The writer process: it outlives its worker, is replaced when it dies, and is never left behind."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from holdfast.core.ids import SaveId
from holdfast.errors import HoldfastError, InternalError, StateError, StoreWriteError
from holdfast.store.layouts.layout import Box
from holdfast.store.layouts.save_plan import plan
from holdfast.store.manage.checkpoint_root import Root
from holdfast.store.read.load import load_into
from holdfast.store.read.validation import inspect
from holdfast.store.write.async_save import WRITERS_MAX, BackgroundSaver
from holdfast.store.write.staging import Pool, PoolReader, SaveOutcome, StagedSave
from holdfast.store.write.writer import WrittenShare
from tests.runtime.runs import exists, until
from tests.store.limits import descriptors
from tests.store.worlds import World, random_array, replicated, save_id
from tests.store.worlds import save as save_whole

pytestmark = pytest.mark.processes

REPOSITORY = Path(__file__).parents[2]

WORKER = """
import os, signal, sys, time
from pathlib import Path
from holdfast.store.write.async_save import BackgroundSaver
from holdfast.store.layouts.save_plan import plan
from tests.store.test_writer_process import large
from tests.store.worlds import save_id

root, how = Path(sys.argv[1]), sys.argv[2]
world = large()
catalogue = world.catalogue()
saver = BackgroundSaver(lambda _id, _result: None).__enter__()
if how == "fork" and os.fork() == 0:
    time.sleep(60)  # a loader process that holds the worker's end of the line open
saver.save(root, save_id(2), catalogue, plan(catalogue, frozenset({0})), 0, world.state(0), {}, {0: {}})
print(saver.writer_pid, flush=True)
if how == "group":
    os.killpg(0, signal.SIGKILL)
os.kill(os.getpid(), signal.SIGKILL)
"""


def large() -> World:
    """Return a job of 24 MB in 3 tensors, large enough that a kill comes before the end of its save."""
    return replicated(1, {f"w{i}": random_array((2000, 1000), "float32", i) for i in range(3)})


@pytest.mark.parametrize("how", ["alone", "group", "fork"])
def test_a_killed_worker_s_save_is_finished_and_the_writer_leaves(tmp_path: Path, how: str) -> None:
    world = large()
    worker = subprocess.Popen(
        [sys.executable, "-c", WORKER, str(tmp_path), how],
        cwd=REPOSITORY, stdout=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    try:
        assert worker.stdout is not None
        writer_pid = int(worker.stdout.readline())
        assert worker.wait(60) == -signal.SIGKILL
        until("the writer is gone", lambda: not exists(writer_pid))
    finally:
        if how == "fork":
            os.killpg(worker.pid, signal.SIGKILL)
        if worker.stdout is not None:
            worker.stdout.close()
    found = inspect(tmp_path / save_id(2).directory(), deep=True)
    assert found.valid and found.sealed, found.reason
    state = world.state(0, empty=True)
    load_into(found.path, state.targets())
    world.check(state)


HALF = """
import os, signal, sys, time
from pathlib import Path
from holdfast.store.write import async_save
from holdfast.store.layouts.save_plan import plan
from tests.store.worlds import random_array, replicated, save_id

class Dying:
    # gives three tensors of four, waits until the disk has the first block, and is killed

    def __init__(self, state, root):
        self.state, self.root, self.given = state, root, 0

    def view(self, fqn, box):
        self.given += 1
        if self.given == 4:
            shards = []
            until_s = time.monotonic() + 60
            while time.monotonic() < until_s and not (shards and shards[0].stat().st_size >= 16_000_000):
                shards = list(self.root.glob("*/.tmp-*shard*"))
                time.sleep(0.001)
            print(saver.writer_pid, flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        return self.state.view(fqn, box)

async_save.ARRIVED_SIZE_BYTES_MIN = 1
root = Path(sys.argv[1])
world = replicated(1, {f"w{i}": random_array((2000, 1000), "float32", i) for i in range(4)})
catalogue = world.catalogue()
saver = async_save.BackgroundSaver(lambda _id, _result: None).__enter__()
saver.save(root, save_id(2), catalogue, plan(catalogue, frozenset({0})), 0, Dying(world.state(0), root), {}, {0: {}})
"""


def test_a_worker_killed_while_it_copies_leaves_nothing_that_counts(tmp_path: Path) -> None:
    save_whole(tmp_path, large(), save_id(1))
    worker = subprocess.Popen(
        [sys.executable, "-c", HALF, str(tmp_path)], cwd=REPOSITORY, stdout=subprocess.PIPE, text=True
    )
    assert worker.stdout is not None
    with worker.stdout:
        writer_pid = int(worker.stdout.readline())
    assert worker.wait(60) == -signal.SIGKILL
    until("the writer is gone", lambda: not exists(writer_pid))
    assert not list((tmp_path / save_id(2).directory()).iterdir()), "what was written is gone"
    assert Root(tmp_path).newest_valid(deep=True).require().step == 1


def test_a_copy_that_fails_takes_the_order_back(tmp_path: Path) -> None:
    world = large()
    catalogue, state = world.catalogue(), world.state(0)
    shares = plan(catalogue, frozenset({0}))

    class Failing:
        given = 0

        def view(self, fqn: str, box: Box) -> memoryview:
            self.given += 1
            return state.view(fqn, box)[: None if self.given < 3 else 5]

    results: dict[SaveId, WrittenShare | HoldfastError] = {}
    with BackgroundSaver(results.__setitem__) as saver:
        for step in (1, 3):
            with pytest.raises(StateError, match="5 bytes offered"):
                saver.save(tmp_path, save_id(step), catalogue, shares, 0, Failing(), {}, {})
            assert not saver.busy
            saver.save(tmp_path, save_id(step + 1), catalogue, shares, 0, state, {}, {})
            assert saver.wait(60)
    assert set(results) == {save_id(2), save_id(4)}, "a save that was taken back is not reported"
    for step in (1, 3):
        assert not inspect(tmp_path / save_id(step).directory()).valid
        assert inspect(tmp_path / save_id(step + 1).directory(), deep=True).sealed


def kill_writers(saver: BackgroundSaver, count: int, done: threading.Event) -> int:
    """Kill the writer and its replacements. Return the number of killed writers before the save was done."""
    killed: list[int] = []
    while len(killed) < count and not done.is_set():
        pid = saver.writer_pid
        if pid in (0, *killed):
            done.wait(0.001)
            continue
        os.kill(pid, signal.SIGKILL)
        killed.append(pid)
    return len(killed)


@pytest.mark.parametrize("count", [1, WRITERS_MAX - 1, WRITERS_MAX])
def test_a_killed_writer_is_replaced_and_the_save_done_again(tmp_path: Path, count: int) -> None:
    world = large()
    catalogue, state = world.catalogue(), world.state(0)
    shares = plan(catalogue, frozenset({0}))
    save_whole(tmp_path, world, save_id(1))
    results: dict[SaveId, WrittenShare | HoldfastError] = {}
    done = threading.Event()

    def told(done_id: SaveId, result: WrittenShare | HoldfastError) -> None:
        results[done_id] = result
        done.set()

    with BackgroundSaver(told) as saver:
        saver.save(tmp_path, save_id(2), catalogue, shares, 0, state, {}, {})
        assert kill_writers(saver, count, done) == count
        assert done.wait(60)
        result = results[save_id(2)]
        if count == WRITERS_MAX:
            assert isinstance(result, StoreWriteError) and "killed by signal 9" in result.message
            assert Root(tmp_path).newest_valid(deep=True).require().step == 1
        else:
            assert isinstance(result, WrittenShare) and result.sealed
            assert Root(tmp_path).newest_valid(deep=True).require().step == 2
        saver.save(tmp_path, save_id(3), catalogue, shares, 0, state, {}, {})
        last = saver.writer_pid
    if count == WRITERS_MAX:
        assert not inspect(tmp_path / save_id(2).directory()).valid, (
            "no writer continued a save that was reported as failed"
        )
    assert isinstance(results[save_id(3)], WrittenShare), "the next save works"
    assert not exists(last)


@contextlib.contextmanager
def no_interpreter(tmp_path: Path) -> Iterator[None]:
    """Let every start of a writer fail: exec finds no interpreter."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "executable", str(tmp_path / "nothing"))
        yield


@contextlib.contextmanager
def no_descriptor(_: Path) -> Iterator[None]:
    """Let every start of a writer fail: this process may not open any more files."""
    old = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, old[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, old)


@pytest.mark.parametrize("refusing", [no_interpreter, no_descriptor])
def test_a_writer_that_cannot_be_started_fails_saves_by_name_and_not_the_next_ones(
    tmp_path: Path, refusing: Callable[[Path], contextlib.AbstractContextManager[None]]
) -> None:
    world = large()
    catalogue, state = world.catalogue(), world.state(0)
    shares = plan(catalogue, frozenset({0}))
    results: dict[SaveId, WrittenShare | HoldfastError] = {}
    with BackgroundSaver(results.__setitem__) as saver:
        without_writer = descriptors()
        saver.save(tmp_path, save_id(1), catalogue, shares, 0, state, {}, {})
        with_writer = descriptors()
        with refusing(tmp_path):
            os.kill(saver.writer_pid, signal.SIGKILL)
            assert saver.wait(60)
            with pytest.raises(StoreWriteError, match="no process can be started") as caught:
                saver.save(tmp_path, save_id(2), catalogue, shares, 0, state, {}, {})
            assert not saver.busy and saver.writer_pid == 0
        now = descriptors().items()
        opened = with_writer.items() - without_writer.items()
        assert len(opened - now) == 2, f"a writer's line and its pidfd: {opened}, {now}"
        assert not now - with_writer.items(), "nothing is left of the attempts"
        saver.save(tmp_path, save_id(3), catalogue, shares, 0, state, {}, {})
    assert "ulimit" in caught.value.hint
    failed = results[save_id(1)]
    assert isinstance(failed, StoreWriteError) and "killed by signal 9), then no process" in failed.message
    assert save_id(2) not in results, "it was refused at the call"
    assert isinstance(results[save_id(3)], WrittenShare)


def test_a_writer_killed_while_idle_costs_nothing(tmp_path: Path) -> None:
    world = large()
    catalogue, state = world.catalogue(), world.state(0)
    results: dict[SaveId, WrittenShare | HoldfastError] = {}
    with BackgroundSaver(results.__setitem__) as saver:
        assert saver.writer_pid == 0, "nothing is started before it is needed"
        for step in (1, 2):
            saver.save(tmp_path, save_id(step), catalogue, plan(catalogue, frozenset({0})), 0, state, {}, {})
            assert saver.wait(60)
            pid = saver.writer_pid
            os.kill(pid, signal.SIGKILL)
            until("it is gone", lambda pid=pid: not exists(pid))  # type: ignore[misc]
    assert isinstance(results[save_id(1)], WrittenShare) and isinstance(results[save_id(2)], WrittenShare)


def test_polite_signals_do_not_end_a_writer(tmp_path: Path) -> None:
    world = large()
    catalogue, state = world.catalogue(), world.state(0)
    results: dict[SaveId, WrittenShare | HoldfastError] = {}
    with BackgroundSaver(results.__setitem__) as saver:
        for step in (1, 2):
            saver.save(tmp_path, save_id(step), catalogue, plan(catalogue, frozenset({0})), 0, state, {}, {})
            saver.wait(60)
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                os.kill(saver.writer_pid, number)
    assert all(isinstance(result, WrittenShare) for result in results.values()) and len(results) == 2


def test_memory_is_reused_and_only_grows(tmp_path: Path) -> None:
    sizes = []
    with BackgroundSaver(lambda _id, _result: None) as saver:
        for step, edge in enumerate((300, 100, 600)):
            world = replicated(1, {"w": np.ones((edge, edge))})
            catalogue = world.catalogue()
            saver.save(
                tmp_path, save_id(step), catalogue, plan(catalogue, frozenset({0})), 0, world.state(0), {}, {}
            )
            sizes.append(saver.pool_size_bytes)
    assert 300 * 300 * 8 <= sizes[0] == sizes[1] < 600 * 600 * 8 <= sizes[2] < 600 * 600 * 8 + 100_000
    for step, edge in enumerate((300, 100, 600)):
        state = replicated(1, {"w": np.ones((edge, edge))}).state(0, empty=True)
        load_into(tmp_path / save_id(step).directory(), state.targets())
        assert (state.shards[0].array == 1).all()


def test_memory_is_pinned_when_it_is_mapped_and_let_go_before_it_changes() -> None:
    said: list[tuple[str, int]] = []

    def pin(memory: memoryview) -> Callable[[], None]:
        size_bytes = len(memory)
        said.append(("pin", size_bytes))
        return lambda: said.append(("unpin", size_bytes))

    with Pool.open(pin) as pool:
        pool.memory(100)
        pool.memory(4000)
        pool.memory(5000)
    pool.close()
    assert said == [("pin", 4096), ("unpin", 4096), ("pin", 8192), ("unpin", 8192)]


def test_orders_outside_the_pool_and_nonsense_in_it_are_refused() -> None:
    pool = Pool.open()
    memory = pool.memory(4096)
    reader = PoolReader(pool.fd)
    with pytest.raises(InternalError, match="not a save job"):
        reader.job(StagedSave(1, 0, 10, 4096, 0))
    for start, size_bytes in ((4000, 200), (-1, 5), (0, -1)):
        with pytest.raises(InternalError, match="outside a pool"):
            reader.job(StagedSave(1, start, size_bytes, 4096, 0))
    with pytest.raises(InternalError, match="larger than its memory"):
        reader.job(StagedSave(1, 0, 10, 1 << 40, 0))
    memory.release()
    pool.close()


def test_outcomes_travel_with_their_class() -> None:
    error = StoreWriteError("cannot write x: No space left on device", hint="free some space")
    back = SaveOutcome.of(3, error).result()
    assert isinstance(back, StoreWriteError) and (back.message, back.hint) == (error.message, error.hint)
    strange = SaveOutcome(1, failed="SystemExit", message="boo").result()
    assert isinstance(strange, InternalError) and "boo" in strange.message
    assert SaveOutcome.of(1, WrittenShare(True, 5, 1.0, ("a",))).result() == WrittenShare(True, 5, 1.0, ())
