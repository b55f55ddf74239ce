"""Saves in the background: the written state is that of the call, and one save runs at a time."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest

from holdfast.core.ids import SaveId
from holdfast.errors import HoldfastError, InternalError, StateError, StoreWriteError
from holdfast.frameworks.common.numpy_state import NumpyState
from holdfast.store.layouts.save_plan import plan
from holdfast.store.read.load import load_into, load_values
from holdfast.store.read.validation import inspect
from holdfast.store.write.async_save import BackgroundSaver
from holdfast.store.write.writer import WrittenShare
from tests.store.limits import descriptors, no_threads
from tests.store.worlds import replicated, save_id

Results = dict[SaveId, WrittenShare | HoldfastError]


def test_later_changes_do_not_reach_the_checkpoint(tmp_path: Path) -> None:
    arrays = {"w": np.arange(150_000.0).reshape(500, 300), "s": np.array(3.0), "e": np.zeros((0, 2))}
    world = replicated(1, arrays)
    state, catalogue = NumpyState.whole(arrays), world.catalogue()
    shares, results = plan(catalogue, frozenset({0})), Results()
    values = {"scheduler": {"last": 1}}
    with BackgroundSaver(results.__setitem__) as saver:
        for step in (1, 2, 3):
            arrays["w"] += 1
            values["scheduler"]["last"] = step
            staged = saver.save(tmp_path, save_id(step), catalogue, shares, 0, state, values, {0: values})
            assert staged.size_bytes == 500 * 300 * 8 + 8
            arrays["w"] *= 2
            values["scheduler"]["last"] = -1
            arrays["w"] /= 2
        assert saver.wait(30) and not saver.busy
    assert [type(result) for result in results.values()] == [WrittenShare] * 3
    for step in (1, 2, 3):
        path = tmp_path / save_id(step).directory()
        assert inspect(path, deep=True).sealed
        back = NumpyState.whole({f: np.zeros_like(a) for f, a in arrays.items()})
        load_into(path, back.targets())
        assert np.array_equal(back.shards[0].array, np.arange(150_000.0).reshape(500, 300) + step)
        assert load_values(path) == {"scheduler": {"last": step}}


def test_only_the_own_share_is_copied(tmp_path: Path) -> None:
    world = replicated(4, {"w": np.zeros((4096, 1024), np.float32)})
    catalogue = world.catalogue()
    shares = plan(catalogue, frozenset(range(4)))
    with BackgroundSaver(lambda _id, _result: None) as saver:
        staged = saver.save(tmp_path, save_id(), catalogue, shares, 1, world.state(1), {}, {})
    assert staged.size_bytes == 4 * 1024 * 1024


def test_one_save_is_in_flight_and_the_next_one_waits(tmp_path: Path) -> None:
    world = replicated(1, {"w": np.zeros(10)})
    catalogue, state = world.catalogue(), world.state(0)
    shares = plan(catalogue, frozenset({0}))
    gate, entered = threading.Event(), threading.Event()

    def slow(_id: SaveId, _result: WrittenShare | HoldfastError) -> None:
        entered.set()
        assert gate.wait(30)

    with BackgroundSaver(slow) as saver:
        saver.save(tmp_path, save_id(1), catalogue, shares, 0, state, {}, {})
        assert entered.wait(30) and saver.busy and not saver.wait(0.01)
        second = threading.Thread(
            target=saver.save, args=(tmp_path, save_id(2), catalogue, shares, 0, state, {}, {})
        )
        second.start()
        second.join(0.05)
        assert second.is_alive() and not (tmp_path / save_id(2).directory()).exists()
        gate.set()
        second.join(30)
        assert not second.is_alive()
    assert inspect(tmp_path / save_id(2).directory()).valid


def test_failures_are_told_and_the_next_save_works(tmp_path: Path) -> None:
    world = replicated(1, {"w": np.zeros(10)})
    catalogue, state = world.catalogue(), world.state(0)
    shares, results = plan(catalogue, frozenset({0})), Results()
    (tmp_path / "file").write_text("")
    with BackgroundSaver(results.__setitem__) as saver:
        saver.save(tmp_path / "file", save_id(1), catalogue, shares, 0, state, {}, {})
        with pytest.raises(StateError, match=r"values\['x'\]"):
            saver.save(tmp_path, save_id(2), catalogue, shares, 0, state, {"x": object()}, {})
        saver.save(tmp_path, save_id(3), catalogue, shares, 0, state, {}, {})
    assert isinstance(results[save_id(1)], StoreWriteError)
    assert save_id(2) not in results
    assert isinstance(results[save_id(3)], WrittenShare)
    with pytest.raises(InternalError, match="outside its with block"):
        saver.save(tmp_path, save_id(4), catalogue, shares, 0, state, {}, {})


def test_a_saver_whose_thread_cannot_start_leaves_nothing() -> None:
    before = descriptors()
    saver = BackgroundSaver(lambda _id, _result: None)
    with no_threads(), pytest.raises(RuntimeError, match="start new thread"):
        saver.__enter__()
    saver.close()
    assert not descriptors().items() - before.items()
    with saver:
        assert not saver.busy


def test_an_error_in_what_follows_a_save_is_logged_and_the_next_save_works(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    world = replicated(1, {"w": np.zeros(10)})
    catalogue, state = world.catalogue(), world.state(0)
    shares, told = plan(catalogue, frozenset({0})), list[SaveId]()

    def done(save: SaveId, _result: WrittenShare | HoldfastError) -> None:
        told.append(save)
        raise TypeError("an unforeseen error")

    with BackgroundSaver(done) as saver:
        for step in (1, 2):
            saver.save(tmp_path, save_id(step), catalogue, shares, 0, state, {}, {})
            assert saver.wait(30)
    assert told == [save_id(1), save_id(2)]
    assert "after the save of step 2" in caplog.text and "an unforeseen error" in caplog.text
