"""Changes that a TensorFlow script makes outside of its blocks count once, whichever process runs the script again."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

from holdfast.errors import StateError
from holdfast.frameworks.tensorflow.state import TensorFlowState, assign
from tests.frameworks.ends import Ends
from tests.frameworks.launched import BOUND_S

pytestmark = pytest.mark.timeout(3 * BOUND_S)


@pytest.fixture(scope="module")
def ends(tmp_path_factory: pytest.TempPathFactory) -> Ends:
    return Ends("tensorflow", tmp_path_factory.mktemp("calm"))


@pytest.mark.parametrize(
    ("way", "kill"),
    [
        ("between", "1:6:changed"),
        ("between", "1:7:mid"),  # the earlier loop is skipped, and its change is made again
        ("before", "0:6:changed"),
        ("behind", "1:5:behind"),
        ("behind", "0:5:changed"),
        ("block", "1:5:mid"),
    ],
)
def test_a_kill_leaves_the_bits_as_they_are(tmp_path: Path, ends: Ends, way: str, kill: str) -> None:
    ends.check_killed(tmp_path, way, kill)


def test_a_graceful_exit_has_what_is_done_behind_the_block(tmp_path: Path, ends: Ends) -> None:
    ends.of(tmp_path, "behind", "0:5:term", code=75)
    ends.check_next_start(tmp_path)


def test_a_periodic_save_has_it_too(tmp_path: Path, ends: Ends) -> None:
    ends.check_undisturbed_saves(tmp_path)
    ends.check_next_start(tmp_path)


def held(extras: dict[str, object]) -> TensorFlowState:
    """Return the state of a small training."""
    model = tf.keras.Sequential([tf.keras.layers.Input((2,)), tf.keras.layers.Dense(1)])
    model.compile("adam", "mse")
    model.optimizer.build(model.trainable_variables)
    return TensorFlowState(model, model.optimizer, extras)


def test_what_is_written_shows_in_the_writes() -> None:
    """The memory tier compares ``writes()`` to see whether the script changed anything after the block."""
    average = tf.Variable(tf.zeros(3))
    state = held({"average": average, "sums": np.zeros(2)})
    before = state.collect(frozen=False).writes()
    assert state.collect(frozen=False).writes() == before
    assign(average, np.ones(3, np.float32))
    after = state.collect(frozen=False).writes()
    assert after != before and sum(one != other for one, other in zip(before, after, strict=True)) == 1


def test_what_cannot_be_saved_is_named_at_once() -> None:
    with pytest.raises(StateError, match=r"state\.words: an array of <U3 cannot be saved"):
        held({"words": np.array(["one"])})
