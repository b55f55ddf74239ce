"""The modes of the process groups: when a collective completes on local data."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from holdfast.errors import PeerLost, StepError
from holdfast.frameworks.torch.comm.comm_state import CommState
from holdfast.frameworks.torch.comm.work import GuardedWork, LocalWork, Several, Wait

pytestmark = pytest.mark.torch


def test_collectives_of_the_script_are_local_after_a_stopped_block_also_when_poisoned() -> None:
    state = CommState()
    state.set_aside(True)
    assert not state.calm and state.begin("all_reduce")
    state.poison("a test")
    assert state.begin("all_reduce")
    state.set_aside(False)
    with pytest.raises(PeerLost):
        state.begin("all_reduce")


def test_collectives_of_another_thread_keep_their_peers() -> None:
    """A thread that saves a checkpoint of the script's own would otherwise write the part of one rank as the whole."""
    state = CommState()
    state.set_aside(True)
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(state.begin, "gather_object").result() is False
    state.set_aside(False)
    assert state.calm and not state.begin("all_reduce")


def test_what_completed_on_local_data_is_not_waited_for_in_a_later_block() -> None:
    """Regression: the wait returned, and the block trained with the data of this rank alone."""
    state = CommState()
    state.shield(True)
    work = LocalWork([], state, "all_reduce")
    assert work.wait()
    state.shield(False)
    assert work.wait()
    state.shield(True)
    with pytest.raises(StepError, match="all_reduce was begun before this block"):
        work.wait()


@pytest.mark.parametrize("awaited", [False, True])
def test_a_work_on_the_stream_says_nothing_after_a_recovery(awaited: bool) -> None:
    """NCCL's ``wait()`` orders streams and returns, even if the communicator was aborted."""
    state = CommState()
    work = GuardedWork(state, "all_reduce", Several([]), [], Wait.STREAM, fill=None, after=None)
    if awaited:
        assert work.wait()
    state.moment = state.moment._replace(epoch=1)
    with pytest.raises(StepError, match="cut off by a recovery"):
        work.wait()
