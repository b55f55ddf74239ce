"""Changes that a MindSpore script makes outside of its blocks count once, whichever process runs the script again."""

from __future__ import annotations

from pathlib import Path

import mindspore as ms
import numpy as np
import pytest
from mindspore import nn

from holdfast.errors import StateError
from holdfast.frameworks.mindspore.state import MindSporeState, assign
from tests.frameworks.ends import Ends
from tests.frameworks.launched import BOUND_S

pytestmark = pytest.mark.timeout(3 * BOUND_S)

RESTART = ("--on-fault", "restart")


@pytest.fixture(scope="module")
def ends(tmp_path_factory: pytest.TempPathFactory) -> Ends:
    return Ends("mindspore", tmp_path_factory.mktemp("calm"))


@pytest.mark.parametrize(
    ("way", "kill", "flags"),
    [
        ("between", "1:6:changed", ()),
        ("between", "0:6:changed", RESTART),
        ("between", "1:7:mid", RESTART),  # the earlier loop is skipped, and its change is made again
        ("between", "0:7:mid", ()),
        ("before", "1:6:changed", ()),  # a newcomer would get the state after the change, and change it again
        ("before", "0:6:changed", RESTART),
        ("behind", "1:5:behind", ()),
        ("behind", "0:5:changed", RESTART),
        ("block", "1:5:mid", ()),
        ("block", "1:5:mid", RESTART),
    ],
)
def test_a_kill_leaves_the_bits_as_they_are(
    tmp_path: Path, ends: Ends, way: str, kill: str, flags: tuple[str, ...]
) -> None:
    ends.check_killed(tmp_path, way, kill, flags)


def test_a_graceful_exit_has_what_is_done_behind_the_block(tmp_path: Path, ends: Ends) -> None:
    ends.of(tmp_path, "behind", "0:5:term", code=75)
    ends.check_next_start(tmp_path)


def test_a_periodic_save_has_it_too(tmp_path: Path, ends: Ends) -> None:
    ends.check_undisturbed_saves(tmp_path)
    ends.check_next_start(tmp_path)


def held(extras: dict[str, object]) -> MindSporeState:
    """Return the state of a small training."""
    net = nn.Dense(2, 1)
    cell = nn.TrainOneStepCell(nn.WithLossCell(net, nn.MSELoss()), nn.SGD(net.trainable_params(), 0.1))
    return MindSporeState(cell, cell.optimizer, extras, {}, copy_all=False)


def test_what_is_written_shows_in_the_writes() -> None:
    """The memory tier compares ``writes()`` to see whether the script changed anything after the block."""
    average = ms.Parameter(ms.Tensor(np.zeros(3, np.float32)), name="average")
    state = held({"average": average, "sums": np.zeros(2)})
    before = state.collect(frozen=False).writes()
    assert state.collect(frozen=False).writes() == before
    assign(average, np.ones(3, np.float32))
    after = state.collect(frozen=False).writes()
    assert after != before and sum(one != other for one, other in zip(before, after, strict=True)) == 1


def test_what_cannot_be_saved_is_named_at_once() -> None:
    with pytest.raises(StateError, match=r"state\.words: an array of <U3 cannot be saved"):
        held({"words": np.array(["one"])})
