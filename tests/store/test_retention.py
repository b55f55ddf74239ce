"""Save policies: pure functions that answer whether a save is due."""

from __future__ import annotations

from datetime import timedelta
from math import sqrt

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.errors import UsageError
from holdfast.store.manage.retention import BestInterval, EverySeconds, EverySteps, Moment, save_policies


def moment(step: int = 10, since_steps: int = 1, since_s: float = 1.0, **more: float) -> Moment:
    """Return a moment of a job."""
    return Moment(step=step, since_steps=since_steps, since_s=since_s, **more)  # type: ignore[arg-type]


@given(st.integers(1, 50), st.lists(st.booleans(), max_size=300), st.integers(0, 100))
def test_every_steps_saves_each_multiple_as_soon_as_the_disk_is_free(
    count: int, busy: list[bool], start: int
) -> None:
    """A delayed save is made at the first free step, once. The grid of due steps stays the multiples."""
    policy, last, saved = EverySteps(count), start, []
    for step, occupied in enumerate(busy, start + 1):
        due = policy(moment(step, step - last))
        assert due == any(s % count == 0 for s in range(last + 1, step + 1))
        if due and not occupied:
            saved.append(step)
            last = step
    if not any(busy):
        assert saved == [s for s in range(start + 1, start + len(busy) + 1) if s % count == 0]


def test_every_seconds() -> None:
    assert EverySeconds(5.0)(moment(since_s=5.0)) and not EverySeconds(5.0)(moment(since_s=4.9))


def test_best_interval_follows_what_is_measured() -> None:
    known = BestInterval(mean_time_between_faults_s=10_000.0, shortest_s=1.0)
    assert known.interval_s(moment(stall_s=0.5)) == sqrt(2 * 0.5 * 10_000)
    assert known.interval_s(moment(stall_s=0.5, durable_s=400.0)) == 400.0, "the disk cannot follow"
    assert known.interval_s(moment()) == 1.0, "nothing is measured yet"
    learned = BestInterval()
    day_s = 86_400.0
    assert learned.interval_s(moment(stall_s=0.5)) == sqrt(day_s)
    calm = learned.interval_s(moment(stall_s=0.5, run_s=3 * day_s))
    rough = learned.interval_s(moment(stall_s=0.5, run_s=3 * day_s, faults=99))
    assert calm == sqrt(4 * day_s) and rough == sqrt(4 * day_s / 100)
    assert learned(moment(stall_s=0.5, since_s=294.0)) and not learned(moment(stall_s=0.5, since_s=293.0))


def test_words_for_policies() -> None:
    assert save_policies(None, None, None) == ()
    assert save_policies(5, None, 2.0) == (EverySteps(5), EverySeconds(2.0))
    assert save_policies(["auto", timedelta(minutes=1)], 3, None) == (
        BestInterval(), EverySeconds(60.0), EverySteps(3),
    )  # fmt: skip
    for wrong in (0, "never", 1.5, False, timedelta(0), [[5]]):
        with pytest.raises(UsageError):
            save_policies(wrong, None, None)
    with pytest.raises(UsageError):
        BestInterval(shortest_s=0.0)
