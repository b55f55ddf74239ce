"""A short run of ``make storm``: kills inside the recovery from a kill."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.soak.chaos import Tally
from tests.soak.storm import cascaded, identical

pytestmark = [pytest.mark.torch, pytest.mark.processes]

PLAN = (("joined", "newcomer", 1), ("verdict", "controller", 1), ("members_replaced", "survivor", 1))


STEPS = 120


@pytest.mark.more
def test_a_slice_of_the_storm(tmp_path: Path) -> None:
    tally = Tally()
    trainings = cascaded(tmp_path, PLAN, STEPS, 5, tally, nproc=3)
    assert tally.failures == []
    assert identical(tmp_path, trainings, "undisturbed", STEPS, tally, nproc=3)
