"""The modes of the process groups: when a collective completes on local data."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from holdfast.errors import PeerLost
from holdfast.frameworks.torch.comm.comm_state import CommState

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
