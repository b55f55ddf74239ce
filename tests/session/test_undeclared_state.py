"""A script's own state outside of the session: refused where it changes at each step, named where it changes later."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

import pytest

from holdfast.errors import UsageError
from holdfast.exit_codes import Exit
from holdfast.session.steps.undeclared_state import UndeclaredState
from holdfast.session.variables.look_schedule import number_of_look
from tests.session.launch import run_job

JOB = str(Path(__file__).with_name("undeclared_job.py"))


@pytest.mark.torch
@pytest.mark.processes
def test_an_average_that_the_session_does_not_have_is_refused_by_name(tmp_path: Path) -> None:
    """Regression: after a kill the replacement had another average, with exit code 0 and without a word."""
    done = run_job(tmp_path, 2, JOB, "1")
    assert done.returncode == Exit.BAD_INPUT, done.stdout
    assert "UsageError: step 2: target (Linear) changes from step to step and is not part" in done.stdout
    assert "next: give it to the session on all ranks, state={'name': object}" in done.stdout


@pytest.mark.torch
@pytest.mark.processes
@pytest.mark.parametrize(("way", "step"), [("renewed", 2), ("late", 6)])
def test_an_average_in_a_new_dict_on_one_rank_is_refused_by_name(tmp_path: Path, way: str, step: int) -> None:
    """Regression: after a kill of this rank the average was another one, with exit code 0 and without a word."""
    done = run_job(tmp_path, 2, JOB, way)
    assert done.returncode == Exit.BAD_INPUT, done.stdout
    error = f"UsageError: step {step}: average['weight'] (and 1 tensor more) changes from step to step"
    assert error in done.stdout, done.stdout


@pytest.mark.torch
@pytest.mark.processes
def test_a_model_that_changes_now_and_then_is_named(tmp_path: Path) -> None:
    done = run_job(tmp_path, 2, JOB, "6")
    assert done.returncode == 0, done.stdout
    assert "step 6: target (Linear) has changed and is not part of the session" in done.stdout


class Changes:
    """An adapter whose script changes values at the given looks.

    Attributes:
        looks: number of looks so far.
        counters: names of counters that change at each look.
        schedules: descriptions of schedules that have moved.
    """

    def __init__(self, *changed: tuple[str, ...], counters: tuple[str, ...] = ()) -> None:
        self.looks = 0
        self.counters: Sequence[str] = counters
        self.schedules: Sequence[str] = ()
        self._changed = changed

    def finder(self) -> Changes:
        """Return this object."""
        return self

    def require_savable(self) -> None:
        """Find that the state can be saved."""

    def moved(self) -> Sequence[str]:
        """Return the descriptions of schedules."""
        return self.schedules

    def changed(self, variables: object, renewed: object = ()) -> tuple[str, ...]:
        """Return the names for this look."""
        self.looks += 1
        return self._changed[self.looks - 1] if self.looks <= len(self._changed) else ()


def test_looks_come_in_threes_and_ever_more_rarely() -> None:
    changes = Changes()
    check = UndeclaredState(changes, on=True)
    due: list[int] = []
    for step in (*range(7, 80), 60, 70, 71, 72):  # the job goes back once
        before = changes.looks
        check.look(step)
        check.look(step)  # the block runs again
        due += [step] * (changes.looks - before)
    assert [step - 7 for step in due] == [0, 1, 2, 4, 5, 6, 16, 17, 18, 64, 65, 66]


def test_a_schedule_that_has_moved_is_refused_at_any_step() -> None:
    changes = Changes()
    check = UndeclaredState(changes, on=True)
    for step in range(10):
        check.look(step)
    changes.schedules = ["the StepLR of optimizer 'default'"]
    with pytest.raises(
        UsageError, match="step 10: the StepLR of optimizer 'default' has moved and is not part"
    ):
        check.look(10)
    UndeclaredState(changes, on=False).look(10)


def test_a_counter_beside_state_of_the_session_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    """It is no error, because the script may set it from a number of the session before each use."""
    check = UndeclaredState(Changes(counters=("ema.updates",)), on=True)
    with caplog.at_level(logging.WARNING, "holdfast"):
        for step in range(20):
            check.look(step)
    (told,) = caplog.messages
    assert "step 2: ema.updates counts beside state of the session" in told


def test_a_change_at_two_steps_in_a_row_is_refused() -> None:
    check = UndeclaredState(Changes((), ("ema",), ("other", "ema")), on=True)
    check.look(0)
    check.look(1)
    with pytest.raises(UsageError, match="step 2: ema changes from step to step"):
        check.look(2)


def test_a_rate_of_learning_that_begins_with_zero_only_delays_the_refusal() -> None:
    """Regression: the first update changed no weight, so the average of diffusers was the same after it."""
    check = UndeclaredState(Changes((), (), ("ema",), ("ema",), ("ema",), ("ema",)), on=True)
    for step in range(6):
        check.look(step)
    with pytest.raises(UsageError, match="step 6: ema changes from step to step"):
        check.look(6)


@pytest.mark.parametrize("every", [2, 3, 4, 5])
def test_a_copy_that_is_filled_now_and_then_is_no_error(every: int, caplog: pytest.LogCaptureFixture) -> None:
    looks = [step for step in range(70) if number_of_look(step) is not None]
    filled = [then // every != now // every for then, now in zip([0, *looks], looks, strict=False)]
    check = UndeclaredState(Changes(*(("copy",) if each else () for each in filled)), on=True)
    for step in range(70):
        check.look(step)
    assert caplog.text.count("copy has changed and is not part of the session") == 1


def test_one_change_at_the_start_is_no_state(caplog: pytest.LogCaptureFixture) -> None:
    """A copy that is filled once, at the first step."""
    check = UndeclaredState(Changes((), ("copy",), ()), on=True)
    for step in range(9):
        check.look(step)
    assert not caplog.text


def test_nothing_is_looked_at_without_the_check() -> None:
    changes = Changes()
    UndeclaredState(changes, on=False).look(0)
    UndeclaredState(object(), on=True).look(0)
    assert changes.looks == 0
