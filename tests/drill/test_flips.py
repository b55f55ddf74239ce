"""A bit flips in the memory of a live rank: it is found, named and undone, and the final bits are the same."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from holdfast import event_log
from holdfast.cli.commands.drill import show
from holdfast.drill.exercise import Drill, Exercise
from holdfast.drill.fault_spec import InjectedFault, Kind
from tests.drill.test_exercise import bare_digest

pytestmark = [pytest.mark.torch, pytest.mark.processes, pytest.mark.timeout(200)]
VERIFY_EVERY = 4
ALL = bool(os.environ.get("HOLDFAST_FLIPS"))
MORE = pytest.mark.skipif(not ALL, reason="make flips")


@pytest.mark.parametrize(
    ("layout", "nproc", "flips", "save_every"),
    [
        ("ddp", 3, (("flip", 2, 9),), 8),
        pytest.param("ddp", 4, (("flip", 2, 9), ("flip-optimizer", 0, 40)), 8, marks=MORE),
        pytest.param("ddp", 2, (("flip", 1, 9), ("flip-optimizer", 0, 40)), 8, marks=MORE),
        pytest.param("ddp", 3, (("flip", 0, 9), ("flip-optimizer", 2, 40)), 0, marks=MORE),
        pytest.param("hsdp", 4, (("flip", 3, 9), ("flip-optimizer", 1, 40)), 8, marks=MORE),
        pytest.param("hsdp", 6, (("flip", 3, 9), ("flip-optimizer", 1, 40)), 0, marks=MORE),
    ],
)
def test_a_flipped_bit_is_found_and_undone(
    tmp_path: Path, layout: str, nproc: int, flips: tuple[tuple[Kind, int, int], ...], save_every: int
) -> None:
    flags = ("--verify-every", str(VERIFY_EVERY))
    exercise = Exercise.builtin(
        nproc=nproc, size="tiny", layout=layout, steps=30 * len(flips), save_every=save_every, flags=flags
    )
    drill = Drill(tmp_path, exercise, 5, lambda _name, _step, _done: None)
    faults = [InjectedFault(kind, (rank,), step, "forward") for kind, rank, step in flips]
    verdict = drill.disturbed("disturbed", faults)
    show(verdict)
    assert verdict.passed, verdict
    assert 0 < verdict.steps_redone
    if nproc == 4 and ALL:
        assert verdict.digest == bare_digest(tmp_path / "bare", layout, 30 * len(flips))
    events = event_log.read(tmp_path / "disturbed" / "events.jsonl").events
    found = [e.data for e in events if e.kind == "corrupted"]
    assert len(found) == len(flips)
    for data, (_, rank, step) in zip(found, flips, strict=True):
        holders = nproc if layout == "ddp" else 2
        assert rank in data["ranks"]
        assert data["certain"] == (holders > 2) and (len(data["ranks"]) == 1 or holders == 2)
        assert step <= data["step"] <= step + VERIFY_EVERY, "found late"
    rungs = {"restart_fresh", "restart_checkpoint"} if save_every else {"restart_fresh"}
    assert {report.action for report in verdict.faults} <= rungs


@pytest.mark.parametrize(
    ("kind", "flags", "action"),
    [
        pytest.param("kill", (), "replace", marks=MORE),
        pytest.param("kill", ("--on-fault", "restart"), "restart_last_gasp", marks=MORE),
    ],
)
def test_a_wrong_copy_is_not_given_away(
    tmp_path: Path, kind: Kind, flags: tuple[str, ...], action: str
) -> None:
    """A rank dies before the flipped part is compared in turn. The survivors compare before they give any state."""
    exercise = Exercise.builtin(
        nproc=4, size="tiny", layout="ddp", steps=120, save_every=40, flags=("--verify-every", "1000", *flags)
    )
    drill = Drill(tmp_path, exercise, 5, lambda _name, _step, _done: None)
    # Between two saves, after the first is done: a pending save would compare before the kill.
    faults = [InjectedFault("flip", (2,), 70, "forward"), InjectedFault(kind, (0,), 73, "forward")]
    verdict = drill.disturbed("disturbed", faults)
    show(verdict)
    assert verdict.identical and not verdict.missed and verdict.code == 0, verdict
    events = event_log.read(tmp_path / "disturbed" / "events.jsonl").events
    chosen = [e.data["action"] for e in events if e.kind == "verdict"]
    found = [e.data for e in events if e.kind == "corrupted"]
    assert [data["ranks"] for data in found] == [[2]] and found[0]["certain"]
    assert chosen == [action, "restart_checkpoint"]
    saved = [e.data["step"] for e in events if e.kind == "saved" and e.data["save_kind"] == "last-gasp"]
    assert saved == []
