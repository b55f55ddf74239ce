"""One process and a GPU: NCCL is aborted and rebuilt, copies are pinned, streams of the script are waited for."""

from __future__ import annotations

import pytest

from tests.adapters.worlds import Worlds
from tests.gpu import scenarios

pytestmark = [pytest.mark.torch, pytest.mark.processes]

GENERATIONS = 50
WARM = 5  # nothing grows from this generation on
SLACK_BYTES = 8 << 20  # other processes of the machine may use the device
CHUNKS_BYTES = 64 << 20


@pytest.mark.parametrize("older", [False, True])
def test_groups_of_nccl_leave_no_memory_behind(worlds: Worlds, older: bool) -> None:
    """``older`` selects the implementation before torch 2.14, in versions that have both."""
    ((first, last),) = worlds.values(
        scenarios.rebuilt, 1, generations=GENERATIONS, first=WARM, older=older, bound_s=100.0
    )
    assert last["device_bytes"] <= first["device_bytes"] + SLACK_BYTES
    assert last["descriptors"] <= first["descriptors"] and last["threads"] <= first["threads"]


def test_copies_into_locked_pages(worlds: Worlds) -> None:
    assert worlds.values(scenarios.pinned_copies, 1) == [{"pinned": True, "same": True, "after": False}]


def test_copies_of_the_state_are_compared_in_bounded_memory(worlds: Worlds) -> None:
    (found,) = worlds.values(scenarios.compared, 1, numel=128 << 20)
    assert found["same"] and found["differs"], found
    assert found["peak_bytes"] <= CHUNKS_BYTES


def test_inf_and_nan_are_found_on_the_device(worlds: Worlds) -> None:
    assert worlds.values(scenarios.checked, 1) == [["", "50.weight"] * 4]


def test_state_is_read_when_all_streams_have_written_it(worlds: Worlds) -> None:
    assert worlds.values(scenarios.collected_late, 1) == [{"same": True}]


def test_an_aborted_block_finds_what_its_own_stream_has_written(worlds: Worlds) -> None:
    assert worlds.values(scenarios.put_back_late, 1) == [[1.0, 2.0]]
