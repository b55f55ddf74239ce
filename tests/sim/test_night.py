"""Nightly runs of new seeds: schedules that once broke an invariant are rerun, and a breach is shrunk to few faults."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from holdfast.sim.faults import SimFault
from holdfast.sim.hosts import host_schedules
from holdfast.sim.hosts.host_schedules import FoundSchedule
from holdfast.sim.hosts.hosts_world import HostsCase, run_hosts
from holdfast.sim.invariants import Violation
from tests.sim import night

FOUND = [
    msgspec.json.decode(line, type=FoundSchedule)
    for line in (Path(__file__).parent / "found_schedules.jsonl").read_bytes().splitlines()
]


def test_a_day_of_seeds_breaks_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert night.main(["--runs", "60", "--first-seed", "1400", "--processes", "1"]) == 0
    shown = capsys.readouterr().out
    assert f"60 runs of the code {night.code_digest()}: no invariant was broken" in shown
    assert "lose_host" in shown and "replacing" in shown, "the coverage by fault and phase"


def test_a_breach_is_shrunk_and_printed_with_its_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks(ranks: int, seed: int, faults: tuple[SimFault, ...], **how: int) -> None:
        if sum(fault.kind == "kill" for fault in faults) >= 2:
            raise Violation("two_kills", "of this test")

    monkeypatch.setattr(night, "run_sim", breaks)
    found = [
        night.run_one(seed, night.Coverage())
        for seed in range(20)
        if sum(fault.kind == "kill" for fault in night.case_of(seed).faults) >= 2
    ]
    assert found and all("two_kills" in line and line.count('"kind":"kill"') == 2 for line in found)
    assert all(line.count('"kind"') == 2 for line in found), "the others are not needed"


def test_a_breach_on_hosts_is_shrunk_to_one_line_that_is_a_test(monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks(seed: int, case: HostsCase) -> None:
        if any(fault.kind == "split" for fault in case.host_faults):
            raise Violation("split", "of this test")

    monkeypatch.setattr(night, "run_hosts", breaks)
    monkeypatch.setattr(host_schedules, "run_hosts", breaks)
    splits = [
        s for s in range(60) if any(f.kind == "split" for f in host_schedules.hosts_case(s).host_faults)
    ]
    for seed in splits:
        line = night.run_one_on_hosts(seed, night.Coverage()).splitlines()[1]
        found = msgspec.json.decode(line, type=FoundSchedule)
        assert (found.seed, found.broke, len(found.case.host_faults)) == (seed, "split", 1)
        assert not found.case.faults and found.case.per_node == 1
    assert splits


@pytest.mark.parametrize("found", FOUND, ids=lambda found: f"{found.broke}-{found.seed}")
def test_a_schedule_that_broke_an_invariant_once_breaks_none(found: FoundSchedule) -> None:
    run_hosts(found.seed, found.case)


@pytest.mark.parametrize("seed", [20850031971, 20851065913, 20871103989])
def test_a_seed_of_one_host_that_broke_an_invariant_once_breaks_none(seed: int) -> None:
    """Regression: a hello after the reported exit; a decision before all agents had repeated the last words; a
    member that was seated after the hello of its agent counted as missing in it.
    """
    assert night.breach(seed, night.case_of(seed)) == ""
