"""Nights of fresh seeds: what has been found stays found, and a breach is shrunk to the faults that it needs."""

from __future__ import annotations

import pytest

from holdfast.sim.faults import SimFault
from holdfast.sim.invariants import Violation
from tests.sim import night


def test_a_day_of_seeds_breaks_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert night.main(["--runs", "60", "--first-seed", "1400", "--processes", "1"]) == 0
    assert "no invariant was broken" in capsys.readouterr().out


def test_a_breach_is_shrunk_and_printed_with_its_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks(ranks: int, seed: int, faults: tuple[SimFault, ...], **how: int) -> None:
        if sum(fault.kind == "kill" for fault in faults) >= 2:
            raise Violation("two_kills", "of this test")

    monkeypatch.setattr(night, "run_sim", breaks)
    lines = night.run(0, 20)
    assert lines and all("two_kills" in line and line.count('"kind":"kill"') == 2 for line in lines)
    assert all(line.count('"kind"') == 2 for line in lines), "the others are not needed"
