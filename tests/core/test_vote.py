"""The vote vector: which votes pass, and the reasons of the others."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.core.worker.vote import STEP_MODULUS, VECTOR_LENGTH, WORLD_SIZE_MAX, Ballot, Tally
from holdfast.errors import InternalError


def tally(*ballots: Ballot, world_size: int | None = None) -> Tally:
    """Return the tally that all ranks read."""
    total = [sum(column) for column in zip(*(b.encode() for b in ballots), strict=True)]
    return Tally.read(total, world_size or len(ballots))


def test_unanimous_sound_votes_pass() -> None:
    assert tally(*[Ballot(step=41)] * 4) == Tally(passed=True)


def test_one_flag_is_everyones() -> None:
    result = tally(Ballot(step=3), Ballot(step=3, exit=True), Ballot(step=3, save=True, nonfinite=True))
    assert result == Tally(passed=True, exit=True, save=True, nonfinite=True)
    result = tally(Ballot(step=3), Ballot(step=3, due=True), Ballot(step=3, busy=True))
    assert result == Tally(passed=True, due=True, busy=True)


@pytest.mark.parametrize(
    ("ballots", "world_size", "reason"),
    [
        ([Ballot(step=3)] * 3, 4, "3 of 4 ranks voted"),
        ([Ballot(step=3)] * 3 + [Ballot(step=3, unsound=True)], 4, "1 of 4 ranks saw a collective break"),
        ([Ballot(step=3)] * 3 + [Ballot(step=4)], 4, "different steps"),
        ([Ballot(step=3)], 2, "1 of 2"),
        ([Ballot(step=3), Ballot(step=3, between=True)], 2, "different steps"),
    ],
)
def test_everything_else_is_refused_with_its_reason(
    ballots: list[Ballot], world_size: int, reason: str
) -> None:
    result = tally(*ballots, world_size=world_size)
    assert not result.passed and reason in result.reason


@given(st.lists(st.integers(0, 2**40), min_size=1, max_size=64))
def test_steps_agree_exactly_when_they_are_equal(steps: list[int]) -> None:
    passed = tally(*(Ballot(step=s) for s in steps)).passed
    assert passed == (len({2 * s % STEP_MODULUS for s in steps}) == 1)


def test_the_largest_sum_fits_int64() -> None:
    largest = max(Ballot(step=STEP_MODULUS - 1, unsound=True, exit=True, save=True, nonfinite=True).encode())
    assert largest * WORLD_SIZE_MAX < 2**63


def test_a_vector_of_another_length_is_an_internal_error() -> None:
    with pytest.raises(InternalError, match=f"expected {VECTOR_LENGTH}"):
        Tally.read([1, 0], 1)


FACTORS = (-3, 1, 1, 1)  # of four holders of one copy


@given(st.integers(0, 2**64 - 1), st.integers(0, 3), st.integers(1, 2**64 - 1))
def test_equal_copies_cancel_out_and_one_that_differs_does_not(digest: int, odd: int, change: int) -> None:
    equal = [Ballot(step=5, plan=9, digest=f * digest) for f in FACTORS]
    assert tally(*equal) == Tally(passed=True, compared=True)
    other = (digest + change) % 2**64
    differs = [
        Ballot(step=5, plan=9, digest=f * (other if r == odd else digest)) for r, f in enumerate(FACTORS)
    ]
    found = tally(*differs)
    # Three times a difference below 2**64 is never a multiple of 2**64, because 3 is odd.
    assert found.differ and not found.passed and "copies of the state differ" in found.reason


def test_digests_of_different_plans_are_not_compared() -> None:
    votes = [Ballot(step=5, plan=plan, digest=17) for plan in (9, 9, 0)]
    assert tally(*votes) == Tally(passed=True)
    assert tally(*[Ballot(step=5, digest=17)] * 3) == Tally(passed=True)


def test_a_broken_collective_is_told_before_a_difference() -> None:
    found = tally(Ballot(step=5, plan=9, digest=1), Ballot(step=5, plan=9, digest=1, unsound=True))
    assert not found.passed and not found.differ


def test_a_replacement_that_is_about_to_make_another_update_is_refused() -> None:
    votes = [Ballot(step=5, updates=7), Ballot(step=5, updates=8, replaces=True), Ballot(step=5, updates=7)]
    found = tally(*votes)
    assert found.diverged and not found.passed and "a replacement makes other updates" in found.reason


def test_another_update_is_told_before_the_difference_that_it_has_made() -> None:
    """An update with a name is made ahead of the vote. Regression: the copies were taken for corrupted ones."""
    votes = [Ballot(step=5, updates=7, plan=9, digest=1), Ballot(step=5, updates=8, plan=9, replaces=True)]
    found = tally(*votes)
    assert found.diverged and not found.differ


def test_ranks_with_different_updates_pass_without_a_replacement_or_after_such_a_vote() -> None:
    assert tally(Ballot(step=5, updates=7), Ballot(step=5, updates=8)) == Tally(passed=True, uneven=True)
    votes = [Ballot(step=5, updates=7, uneven=True), Ballot(step=5, updates=8, replaces=True)]
    assert tally(*votes) == Tally(passed=True, uneven=True)
    assert tally(Ballot(step=5, updates=7), Ballot(step=5, updates=7, replaces=True)) == Tally(passed=True)


def test_an_update_after_the_vote_of_the_step_before_is_told_although_this_vote_passes() -> None:
    votes = [Ballot(step=5, updates=7, earlier=3), Ballot(step=5, updates=8, earlier=4, replaces=True)]
    assert tally(*votes) == Tally(passed=True, uneven=True, diverged_earlier=True)


def test_copies_that_an_earlier_update_of_a_replacement_has_changed_are_not_taken_for_corrupted_ones() -> (
    None
):
    votes = [
        Ballot(step=5, updates=7, earlier=3, plan=9, digest=1),
        Ballot(step=5, updates=7, earlier=4, plan=9, replaces=True),
    ]
    found = tally(*votes)
    assert found.diverged_earlier and not found.differ


def test_updates_are_compared_among_the_ranks_that_give_a_number() -> None:
    votes = [Ballot(step=5, updates=7), Ballot(step=5, replaces=True), Ballot(step=5, updates=7, earlier=3)]
    assert tally(*votes) == Tally(passed=True)


def test_variables_that_begin_again_are_refused_only_if_no_rank_has_those_of_the_job() -> None:
    again = Ballot(step=5, variables=3, joins=True, again=True)
    found = tally(again, again)
    assert found.began_again and found.explained and not found.passed and not found.mixed
    assert tally(again, Ballot(step=5, variables=3)) == Tally(passed=True)
    assert tally(again, Ballot(step=5, variables=3, joins=True)).began_again


def test_a_cause_with_an_error_of_its_own_is_not_reported_as_a_fault() -> None:
    """Regression: a replacement with other variables was, and the fence could hide the error on the other ranks."""
    began_again = tally(Ballot(step=5, variables=3), Ballot(step=5, variables=4, joins=True))
    diverged = tally(Ballot(step=5, updates=3), Ballot(step=5, updates=4, replaces=True))
    assert began_again.began_again and began_again.explained and diverged.explained
    assert not tally(Ballot(step=5), Ballot(step=6)).explained and not tally(Ballot(step=5)).explained
