"""States in shared memory: kept, torn, damaged, without room; also a process that is killed during a copy."""

from __future__ import annotations

import os
import random
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from holdfast.errors import CheckpointInvalid, StateError
from holdfast.store.layouts.layout import Box, RankLayout, TensorMeta
from holdfast.store.shared_memory.memory_slots import Slots, kept_steps, marked_step, open_kept, slot_path
from tests.runtime.runs import SOURCE

SIZES = {"weight": 3 << 20, "bias": 7, "nothing": 0}
LAYOUT = RankLayout(2, tuple(TensorMeta(n, "U8", (8 << 20,), Box((0,), (s,))) for n, s in SIZES.items()), 4)


class State:
    """The state of a rank after ``step`` updates."""

    def __init__(self, step: int) -> None:
        self.step = step

    def view(self, fqn: str, box: Box) -> memoryview:
        return memoryview(random.Random(f"{fqn}{self.step}").randbytes(box.numel))


def keep(slots: Slots, step: int) -> None:
    """Keep the state of ``step``."""
    slots.keep(step, State(step), LAYOUT, b'{"step": %d}' % step, b"{}")


def proves(directory: Path, step: int) -> None:
    """Check that the state of ``step`` exists, with every byte."""
    with open_kept(directory, 2, step) as kept:
        assert kept.values == b'{"step": %d}' % step and kept.step == step
        for meta in LAYOUT.tensors:
            assert kept.view(meta.fqn, meta.box) == State(step).view(meta.fqn, meta.box)
        assert set(kept.catalogue().by_fqn) == set(SIZES), "also those of which this rank has nothing"


def test_two_states_are_kept_and_the_older_one_gives_way(tmp_path: Path) -> None:
    slots = Slots(tmp_path, 2)
    for step in (0, 1, 2, 2):
        keep(slots, step)
    assert slots.steps() == kept_steps(tmp_path, 2) == (1, 2)
    assert kept_steps(tmp_path, 1) == ()
    proves(tmp_path, 1)
    proves(tmp_path, 2)
    with pytest.raises(CheckpointInvalid, match="no state of rank 2 at step 0"), open_kept(tmp_path, 2, 0):
        pass
    slots.keep_only(1)
    assert slots.steps() == (1,)
    keep(slots, 2)
    proves(tmp_path, 1)
    proves(tmp_path, 2)
    assert {path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {0o600}
    slots.remove()
    assert list(tmp_path.iterdir()) == []


def test_a_state_is_whole_when_it_is_said_and_until_the_next_copy(tmp_path: Path) -> None:
    slots = Slots(tmp_path, 2)
    keep(slots, 1)
    assert slots.steps() == (1,) and kept_steps(tmp_path, 2, whole=True) == ()
    with open_kept(tmp_path, 2, 1) as kept:
        assert not kept.whole
    keep(slots, 1)  # amended with a change after the block
    slots.finish()
    assert kept_steps(tmp_path, 2, whole=True) == (1,)
    with open_kept(tmp_path, 2, 1) as kept:
        assert kept.whole
    keep(slots, 2)
    keep(slots, 3)
    assert slots.steps() == (2, 3) and slots.steps(whole=True) == (), (
        "the word of the state before is not theirs"
    )
    newest = slots.newest()
    assert newest is not None and newest.step == 3 and slots.newest(whole=True) is None
    slots.finish()
    assert slots.newest(whole=True) == newest._replace(whole=True)


@pytest.mark.parametrize("where", ["data", "description", "marker"])
def test_a_flipped_bit_is_refused_and_the_slot_dropped(tmp_path: Path, where: str) -> None:
    slots = Slots(tmp_path, 2)
    keep(slots, 4)
    keep(slots, 5)
    path = next(path for path in tmp_path.iterdir() if marked_step(path) == 5)
    data = bytearray(path.read_bytes())
    data[{"data": 9000, "description": len(data) - 4000, "marker": 9}[where]] ^= 4
    if where == "description":
        end = data.rindex(b'{"step": 5}')
        data[end + 2] ^= 4
    path.write_bytes(data)
    with pytest.raises(CheckpointInvalid), open_kept(tmp_path, 2, 5):
        pass
    assert kept_steps(tmp_path, 2) == (4,), "it is no claim any more"
    proves(tmp_path, 4)


COPIER = """
import sys
from pathlib import Path
from tests.store.test_memory_slots import Slots, keep
slots, step = Slots(Path(sys.argv[1]), 2), 0
while True:
    keep(slots, step)
    print(step, flush=True)
    step += 1
"""


@pytest.mark.processes
def test_a_process_killed_while_it_copies_leaves_the_state_before(tmp_path: Path) -> None:
    torn = 0
    for number in range(6):
        place = tmp_path / str(number)
        place.mkdir()
        root = str(Path(__file__).parents[2])
        env = {**os.environ, "PYTHONPATH": os.pathsep.join((str(SOURCE), root))}
        with subprocess.Popen(
            [sys.executable, "-c", COPIER, str(place)], env=env, stdout=subprocess.PIPE
        ) as child:
            assert child.stdout is not None
            for _ in range(2):
                child.stdout.readline()
            time.sleep(random.Random(number).uniform(0.0, 0.02))
            child.send_signal(signal.SIGKILL)
            said = [int(line) for line in child.stdout.read().split()] or [1]
        held = kept_steps(place, 2)
        assert held and held[-1] >= said[-1], "what was said to be kept is there"
        for step in held:
            proves(place, step)
        torn += len(held) == 1
    assert torn > 0, "no kill came in the middle of a copy"


def test_a_lack_of_memory_is_an_error_and_the_state_before_stays(tmp_path: Path) -> None:
    slots = Slots(tmp_path, 2)
    keep(slots, 0)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
        with pytest.raises(StateError, match="shared memory cannot be had"):
            keep(slots, 1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)
    proves(tmp_path, 0)


def test_a_slot_of_nonsense_holds_nothing(tmp_path: Path) -> None:
    slot_path(tmp_path, 2, 0).write_bytes(random.Random(1).randbytes(5000))
    slot_path(tmp_path, 2, 1).write_bytes(b"")
    assert kept_steps(tmp_path, 2) == ()
    keep(Slots(tmp_path, 2), 3)
    proves(tmp_path, 3)
