"""A short slice of ``make chaos``: everything may be killed, the bits stay the same."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.drill.chaos import chaos

pytestmark = [pytest.mark.torch, pytest.mark.processes]


def test_a_slice_of_chaos(tmp_path: Path) -> None:
    tally = chaos(tmp_path / "chaos", faults=4, steps=100, seed=3, nproc=2)
    assert tally.failures == [] and tally.faults >= 4
    assert sum(map(len, tally.times_s.values())) >= 1
