"""Detection of a rank that computes wrong gradients: all cases of one such rank, without processes."""

from __future__ import annotations

import random
from collections.abc import Mapping
from itertools import product

import pytest

from holdfast.core.watch.recomputation import (
    AT_FIRST,
    OFFSETS,
    Ran,
    RecomputationVerdict,
    encode,
    owner_of,
    read,
)

GOOD = 1 << 63  # larger than a signed word


def meet(size: int, ran: Mapping[int, Mapping[int, Ran | None]]) -> RecomputationVerdict:
    vectors = [encode(copy, size, ran[copy]) for copy in range(size)]
    return read([sum(words) for words in zip(*vectors, strict=True)], size)


def results(
    size: int, offsets: int, wrong: Mapping[tuple[int, int], int]
) -> dict[int, dict[int, Ran | None]]:
    """Return the results of each copy by offset. ``wrong`` has what is added to the gradients of (copy, offset)."""
    return {
        copy: {
            offset: Ran(
                owner_of(copy, offset, size),
                GOOD + owner_of(copy, offset, size) + wrong.get((copy, offset), 0),
            )
            for offset in range(offsets)
        }
        for copy in range(size)
    }


@pytest.mark.parametrize("size", [2, 3, 4, 7])
def test_copies_that_compute_the_same_agree(size: int) -> None:
    assert meet(size, results(size, AT_FIRST, {})).outcome == "agree"
    assert meet(size, results(size, OFFSETS, {})).outcome == "agree"


@pytest.mark.parametrize("size", [3, 4, 5, 8])
@pytest.mark.parametrize("liar", [0, 2])
def test_one_copy_that_is_wrong_is_named_and_no_other(size: int, liar: int) -> None:
    """The wrong copy may be in any of the three runs. A third result is requested if one of the first two is wrong."""
    for runs in product((0, 5), repeat=OFFSETS):
        wrong = {(liar, offset): runs[offset] + offset * (runs[offset] > 0) for offset in range(OFFSETS)}
        first = meet(size, results(size, AT_FIRST, wrong))
        assert first.outcome == ("ask" if any(runs[:AT_FIRST]) else "agree")
        found = meet(size, results(size, OFFSETS, wrong))
        assert found == (
            RecomputationVerdict("wrong", (liar,)) if any(runs) else RecomputationVerdict("agree")
        )


def test_of_two_copies_one_that_is_wrong_now_and_then_is_named() -> None:
    """If the wrong rank computes its batch correctly in a second run, two ranks agree.

    An always wrong rank is not found.
    """
    assert meet(2, results(2, OFFSETS, {(1, 0): 3})) == RecomputationVerdict("wrong", (1,))
    assert meet(2, results(2, OFFSETS, {(1, 0): 3, (1, 1): 3, (1, 2): 3})).outcome == "unclear"


@pytest.mark.parametrize("size", [2, 3, 5])
def test_a_block_that_depends_on_its_rank_names_nothing(size: int) -> None:
    wrong = {(copy, offset): 10 * copy for copy in range(size) for offset in range(OFFSETS)}
    assert meet(size, results(size, AT_FIRST, wrong)).outcome == "ask"
    assert meet(size, results(size, OFFSETS, wrong)) == RecomputationVerdict("unclear", tuple(range(size)))


def test_kernels_that_add_in_any_order_name_nothing() -> None:
    draw = random.Random(1)
    for _ in range(200):
        size = draw.randint(2, 6)
        wrong = {(c, o): draw.getrandbits(60) for c in range(size) for o in range(OFFSETS)}
        assert meet(size, results(size, OFFSETS, wrong)).outcome == "unclear"


def test_what_is_not_there_is_not_waited_for() -> None:
    """A newcomer may be unable to run the blocks. A third result may be one that no rank can give."""
    ran = results(3, AT_FIRST, {(1, 0): 3})
    assert meet(3, ran).outcome == "ask"
    for copy in ran:
        ran[copy][2] = None
    assert meet(3, ran) == RecomputationVerdict("unclear", (1,))
    ran[0] = dict.fromkeys(range(OFFSETS))
    assert meet(3, ran).outcome in ("agree", "unclear")
    assert meet(3, {copy: dict.fromkeys(range(OFFSETS)) for copy in range(3)}).outcome == "nothing"
    assert meet(3, {copy: {} for copy in range(3)}).outcome == "nothing"


def test_another_batch_is_no_wrong_gradient() -> None:
    ran = results(3, AT_FIRST, {(0, 1): 4})
    ran[0][1] = Ran(99, 7)
    assert meet(3, ran) == RecomputationVerdict("unlike", (1,))
