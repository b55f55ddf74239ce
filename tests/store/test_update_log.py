"""The file of the update log: its content after torn copies, damage and steps that are run again."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from holdfast.errors import CheckpointInvalid, StateError
from holdfast.store.shared_memory.update_log import (
    Gradient,
    Update,
    UpdateLog,
    log_path,
    open_updates,
    reachable,
)

RANK = 3


def update(step: int, salt: int = 0, size: int = 100) -> Update:
    """Return an update of two gradients, one of them empty."""
    numbers = np.arange(size, dtype=np.float32) + step + salt
    data = memoryview(numbers.tobytes())
    return Update(
        step,
        f'{{"lr": {step}}}'.encode(),
        (Gradient("a", "F32", (size,), data), Gradient("b", "F32", (0,), memoryview(b""))),
    )


def filled(where: Path, entries: int, *steps: int) -> UpdateLog:
    """Return a proven log with the updates of these steps."""
    log = UpdateLog(where, RANK, entries)
    for step in steps:
        log.append(update(step))
    log.prove()
    return log


def test_what_was_written_is_read(tmp_path: Path) -> None:
    filled(tmp_path, 4, 5, 6, 7)
    with open_updates(tmp_path, RANK, 5, 8) as found:
        assert [(u.step, u.settings, u.gradients) for u in found] == [tuple(update(s)) for s in (5, 6, 7)]


@pytest.mark.parametrize(
    ("entries", "logged", "states", "found"),
    [
        (4, (5, 6, 7), (5,), (6, 7, 8)),
        (4, (5, 6, 7), (6,), (7, 8)),
        (4, (5, 6, 7), (4,), ()),  # the update of step 4 is missing
        (4, (5, 7), (5,), (6,)),
        (4, (5, 6, 7), (8,), ()),
        (4, (5, 6, 7), (5, 8), (6, 7, 8)),
        (2, (5, 6, 7), (5,), ()),  # the ring has overwritten it
        (2, (5, 6, 7), (6,), (7, 8)),
        (4, (5, 6), (), ()),
    ],
)
def test_steps_that_can_be_made_again(
    tmp_path: Path, entries: int, logged: tuple[int, ...], states: tuple[int, ...], found: tuple[int, ...]
) -> None:
    filled(tmp_path, entries, *logged)
    assert reachable(tmp_path, RANK, states) == found
    assert reachable(tmp_path, RANK + 1, states) == ()


def test_a_log_that_was_not_proven_counts_for_nothing(tmp_path: Path) -> None:
    log = UpdateLog(tmp_path, RANK, 4)
    log.append(update(5))
    assert reachable(tmp_path, RANK, (5,)) == ()
    log.prove()
    assert reachable(tmp_path, RANK, (5,)) == (6,)
    again = UpdateLog(tmp_path, RANK, 4)  # the log of the process that took the rank's place
    again.append(update(6))
    assert reachable(tmp_path, RANK, (5,)) == (6, 7)


def test_a_copy_that_is_cut_off_leaves_what_was_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = filled(tmp_path, 4, 5, 6)

    def cut(pieces: Iterable[memoryview], goal: memoryview) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("holdfast.store.shared_memory.update_log.copy_hashed", cut)
    for step in (6, 7):  # a step that is run again, and a new one
        with pytest.raises(KeyboardInterrupt):
            log.append(update(step, salt=1))
    assert reachable(tmp_path, RANK, (5,)) == (6,)
    with open_updates(tmp_path, RANK, 5, 6) as found:
        assert found[0].gradients == update(5).gradients


def test_a_step_that_is_run_again_takes_the_place_of_its_first_try(tmp_path: Path) -> None:
    log = filled(tmp_path, 4, 5, 6)
    log.append(update(6, salt=9))
    with open_updates(tmp_path, RANK, 6, 7) as found:
        assert found[0].gradients == update(6, salt=9).gradients


def test_updates_that_did_not_happen_are_dropped(tmp_path: Path) -> None:
    log = filled(tmp_path, 4, 5, 6, 7)
    log.truncate(6)
    assert reachable(tmp_path, RANK, (5,)) == (6,)
    log.append(update(6))
    assert reachable(tmp_path, RANK, (5,)) == (6, 7)
    log.remove()
    log.truncate(0)
    assert reachable(tmp_path, RANK, (5,)) == ()


def test_an_update_with_more_gradients_begins_a_new_file(tmp_path: Path) -> None:
    log = filled(tmp_path, 4, 5)
    log.append(update(6, size=10_000))
    assert reachable(tmp_path, RANK, (5, 6)) == ()  # it must be proven again
    log.prove()
    assert reachable(tmp_path, RANK, (5, 6)) == (7,)


def test_a_log_takes_less_than_half_of_what_is_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.statvfs", lambda path: SimpleNamespace(f_bavail=4, f_frsize=1024))
    log = UpdateLog(tmp_path, RANK, 5)
    with pytest.raises(StateError, match="would take half of shared memory"):
        log.append(update(5))
    assert not log_path(tmp_path, RANK).exists()


@pytest.mark.parametrize(("at", "what"), [(4096 + 64, "gradient of a"), (4096 + 64 + 448, "description")])
def test_a_flipped_bit_is_seen(tmp_path: Path, at: int, what: str) -> None:
    filled(tmp_path, 2, 6)
    with log_path(tmp_path, RANK).open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 4]))
    with pytest.raises(CheckpointInvalid, match=f"update of step 6: .*{what}"):
        with open_updates(tmp_path, RANK, 6, 7):
            pass


def test_what_is_not_there_is_refused(tmp_path: Path) -> None:
    for stop in (6, 7):
        with pytest.raises(
            CheckpointInvalid, match=r"no log of updates of rank 3|update of step 6: it is not"
        ):
            with open_updates(tmp_path, RANK, 5, stop):
                pass
        filled(tmp_path, 4, 5)
    with open_updates(tmp_path, RANK, 9, 9) as found:
        assert found == ()
