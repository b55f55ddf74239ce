"""The step that a rank's state belongs to: for any order of the calls, never with the arguments of another step."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.compat.step_state import StepState

BETWEEN = "ttp_set_ckpt_args was not called since its last update"


def test_the_state_is_whole_when_both_calls_were_made() -> None:
    standing = StepState(bound=True)
    for step in (1, 2):
        standing.begin()
        assert standing.why == "its update was not completed"
        standing.end(step)
        assert standing.why == BETWEEN and standing.step == step - 1
        standing.give((step, "model"))
        assert standing.whole and standing.step == step and standing.arguments == (step, "model")


def test_an_iteration_without_an_update_has_a_number_of_its_own() -> None:
    """The loss scale was too large 15 times: 16 iterations make one update."""
    standing = StepState(bound=True)
    for iteration in range(1, 16):
        standing.give((iteration, "model"))
        assert standing.step == 0
    standing.begin()
    standing.end(1)
    standing.give((16, "model"))
    assert standing.whole and standing.step == 16
    assert standing.moves((17, "model"))
    standing.give((17, "model"))
    assert standing.whole and standing.step == 17 and standing.arguments == (17, "model")


def test_arguments_of_before_the_update_are_told() -> None:
    standing = StepState(bound=True)
    standing.begin()
    standing.end(18)
    standing.give((17, "model"))
    assert standing.why == "ttp_set_ckpt_args says 17 iterations after the update of iteration 18"
    assert standing.step == 0


def test_a_live_object_is_given_once() -> None:
    standing = StepState(bound=False)
    live = {"step": 0}
    standing.give(live)
    standing.begin()
    standing.end(7)
    assert standing.whole and standing.step == 7 and standing.arguments is live


def test_a_count_binds_whoever_gives_it() -> None:
    standing = StepState(bound=False)
    standing.give((0, "model"))
    standing.begin()
    standing.end(1)
    assert standing.why == BETWEEN


def test_handlers_that_take_no_arguments_need_none() -> None:
    standing = StepState(bound=True)
    standing.begin()
    standing.end(1)
    assert standing.why == BETWEEN
    assert not standing.begin()
    standing.end(2)
    assert standing.whole and standing.step == 2


def test_arguments_that_were_left_out_are_told_once() -> None:
    standing = StepState(bound=True)
    told = []
    for step in (1, 2, 3, 4):
        told.append(standing.begin())
        standing.end(step)
        if step == 1:
            standing.give((1, "model"))
    assert told == [False, False, True, False]
    assert standing.step == 1 and not standing.whole


CALLS = st.lists(st.sampled_from(["begin", "end", "give", "skip"]), max_size=40)


@settings(max_examples=300, deadline=None)
@given(CALLS)
def test_no_order_of_calls_pairs_a_state_with_other_arguments(calls: list[str]) -> None:
    """``weights`` is the iteration of the last update that began, ``given`` that of the last arguments."""
    standing = StepState(bound=True)
    iteration = updates = 0
    begun = False
    since = True  # arguments were given since the last update began
    for call in calls:
        if call == "begin" and not begun:
            standing.begin()
            begun, since = True, False
            iteration += 1
        elif call == "end" and begun:
            updates += 1
            standing.end(updates)
            begun = False
        elif call == "give":
            standing.give((iteration, "model"))
            since = True
        elif call == "skip" and not begun and since:
            iteration += 1
            standing.give((iteration, "model"))
        if standing.whole and standing.arguments is not None and updates:
            assert not begun and since
            assert standing.arguments[0] == standing.step == iteration
