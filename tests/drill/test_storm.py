"""A short slice of ``make storm``: kills inside the recovery from a kill."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.drill.chaos import Tally
from holdfast.drill.storm import identical, trained

pytestmark = [pytest.mark.torch, pytest.mark.processes]

PLAN = (("joined", "newcomer", 1), ("verdict", "controller", 1), ("members_replaced", "survivor", 1))


def test_a_slice_of_the_storm(tmp_path: Path) -> None:
    tally = Tally()
    struck = trained(tmp_path, "cascades", 120, 5, tally, nproc=3)
    assert struck.cascades(PLAN) == len(PLAN)
    struck.close()
    assert tally.failures == []
    assert identical(tmp_path, struck, "undisturbed", 120, tally, nproc=3)
