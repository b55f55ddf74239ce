"""Coverage of a tensor by boxes: exact, and bounded in work."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.errors import StateError
from holdfast.store.layouts.coverage import uncovered
from holdfast.store.layouts.layout import Box
from tests.store.worlds import cut


@st.composite
def drawn(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Box]]:
    """Draw a shape and boxes inside it."""
    shape = tuple(draw(st.lists(st.integers(0, 5), max_size=4)))
    boxes = []
    for _ in range(draw(st.integers(0, 8))):
        offsets = tuple(draw(st.integers(0, n)) for n in shape)
        boxes.append(
            Box(offsets, tuple(draw(st.integers(0, n - o)) for n, o in zip(shape, offsets, strict=True)))
        )
    return shape, boxes


@given(drawn())
def test_exactly_what_no_box_covers(case: tuple[tuple[int, ...], list[Box]]) -> None:
    shape, boxes = case
    expected = np.ones(shape, int)
    for box in boxes:
        expected[cut(box)] = 0
    found = np.zeros(shape, int)
    for box in uncovered(shape, boxes):
        found[cut(box)] += 1
    assert (found == expected).all()


def test_a_chess_board_of_single_elements() -> None:
    edge = 120
    boxes = [Box((i, j), (1, 1)) for i in range(edge) for j in range(edge) if (i + j) % 2]
    random.Random(0).shuffle(boxes)
    assert len(uncovered((edge, edge), boxes)) == edge * edge // 2


def test_boxes_made_to_take_the_square_of_time_are_refused() -> None:
    count = 2000
    stairs = [Box((i, 2 * i), (count - i, 1)) for i in range(count)]
    with pytest.raises(StateError, match="too many parts"):
        uncovered((count, 2 * count), stairs)
