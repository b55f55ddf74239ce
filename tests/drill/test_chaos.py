"""A short run of ``make chaos``: any process may be killed, and the final bits stay the same."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from holdfast.drill.exercise import small
from tests.soak.chaos import SAVE_EVERY, Chaos, Tally, chaos

pytestmark = [pytest.mark.torch, pytest.mark.processes]


@pytest.mark.more
def test_a_slice_of_chaos(tmp_path: Path) -> None:
    tally = chaos(tmp_path / "chaos", faults=4, seed=3, exercises={"ddp": small("ddp", 300, SAVE_EVERY, 2)})
    assert tally.failures == [] and tally.faults >= 4
    assert sum(map(len, tally.times_s.values())) >= 1


@pytest.mark.more
def test_a_worker_that_stops_while_an_agent_takes_over_is_found(tmp_path: Path) -> None:
    """The new agent has not seen a step. It uses the step time that the last agent had learned."""
    tally = Tally()
    one = Chaos(tmp_path, small("ddp", 300, SAVE_EVERY, 2), random.Random(4), tally)
    try:
        assert one.settle(150)  # some seconds: the agent has learned the step time, and stored it
        assert one.hit(["agent"]) and one.hit(["stopped worker"])
    finally:
        one.work(0)
    assert tally.failures == [] and list(tally.times_s) == ["agent", "stopped worker"]


@pytest.mark.more
def test_a_newcomer_that_is_stopped_in_its_start_is_replaced(tmp_path: Path) -> None:
    tally = Tally()
    one = Chaos(tmp_path, small("ddp", 300, SAVE_EVERY, 2), random.Random(4), tally)
    try:
        assert one.settle(50)
        assert one.hit(["stopped newcomer"])
    finally:
        one.work(0)
    assert tally.failures == [] and list(tally.times_s) == ["stopped newcomer"]


@pytest.mark.more
def test_an_agent_that_is_stopped_is_replaced_by_the_launcher(tmp_path: Path) -> None:
    """Without the launcher, the stopped agent would neither end nor be replaced, and its node would be given up."""
    tally = Tally()
    one = Chaos(tmp_path, small("ddp", 300, SAVE_EVERY, 2), random.Random(4), tally)
    try:
        assert one.settle(50)
        assert one.hit(["stopped agent"]) and one.hit(["worker"])
    finally:
        one.work(0)
    assert tally.failures == []


@pytest.mark.more
def test_a_launcher_that_is_asked_to_end_is_started_again(tmp_path: Path) -> None:
    tally = Tally()
    one = Chaos(tmp_path, small("ddp", 300, SAVE_EVERY, 2), random.Random(4), tally)
    try:
        assert one.settle(50)
        assert one.hit(["terminated launcher"])
    finally:
        one.work(0)
    assert tally.failures == [] and tally.struck == {"terminated launcher": 1}
    assert (tmp_path / "run-002").is_dir()
