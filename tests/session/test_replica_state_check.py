"""The ranks' descriptions of their state fit into one message, however large they are."""

from __future__ import annotations

import json
from typing import Any

import pytest

from holdfast.core.protocol.messages import FRAME_SIZE_BYTES_MAX
from holdfast.session.loops.replica_state_check import SAID_SIZE_BYTES_MAX, Said, all_alike, differing, spoken

RANKS = 512


def said(odd: int = -1) -> Said:
    """Return the description of a rank with thousands of buffers. The buffer of number ``odd`` differs."""
    buffers = {
        f"module.backbone.stage.{n}.norm.running_mean": f"{n + (n == odd) * 7:016x}" for n in range(4000)
    }
    return "part", {"scores": "0123456789abcdef"}, buffers, [0, 7]


@pytest.mark.parametrize(("odd", "found"), [(-1, []), (1234, ["one of 4000"])])
def test_many_buffers_of_many_ranks_are_compared_without_their_names(odd: int, found: list[str]) -> None:
    assert len(json.dumps(said())) * RANKS > FRAME_SIZE_BYTES_MAX
    size_bytes = SAID_SIZE_BYTES_MAX // RANKS
    lines = [spoken(one, size_bytes) for one in (said(), said(odd))]
    assert all(len(line) <= size_bytes for line in lines)
    read: list[Any] = [json.loads(line) for line in lines]
    assert differing([(part, buffers) for part, _, buffers, _ in read]) == found
    assert differing([(part, items) for part, items, *_ in read]) == []


def test_few_keep_their_names() -> None:
    one: Any = json.loads(spoken(said(5), SAID_SIZE_BYTES_MAX))
    other: Any = json.loads(spoken(said(), SAID_SIZE_BYTES_MAX))
    assert differing([("part", one[2]), ("part", other[2])]) == ["module.backbone.stage.5.norm.running_mean"]


@pytest.mark.parametrize(
    ("drawn", "copies"),
    [
        ([[0, 5], [1, 5]], 2),
        ([[0, 5, 6], [1, 5, 6], [2, 5, 6]], 3),
        ([[0, 5], [1, 6]], 0),
        ([[0, 5], [0, 5]], 0),  # two parts of one copy
        ([[0, 5], [0, 5], [2, 5], [2, 5]], 2),
        ([[0, 5], []], 0),  # a rank without a loader
        ([[0, 0], [1, 0]], 0),  # batches of unknown content
    ],
)
def test_copies_of_the_model_that_draw_the_same_batch_are_found(drawn: list[list[int]], copies: int) -> None:
    assert all_alike(drawn) == copies
