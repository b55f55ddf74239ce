"""Pure FSDP, where one rank alone holds its shards: kills, torn copies and flipped bits against the memory tier."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.session.launch import run_job
from tests.session.test_jobs import RANKS, Result, check_survivors, events, start

pytestmark = [pytest.mark.torch, pytest.mark.processes]
long = pytest.mark.skipif("HOLDFAST_MEMORY" not in os.environ, reason="make memory")


def lost(where: Path) -> list[int]:
    """Return how many steps each recovery had to do again."""
    return [event["data"]["steps_lost"] for event in events(where, "restored")][1:]


def actions(where: Path) -> list[str]:
    """Return the rungs that were taken."""
    return [event["data"]["action"] for event in events(where, "verdict")]


@pytest.mark.parametrize(
    ("every", "fault", "flags", "rung", "again"),
    [
        pytest.param(1, ("--die", "2@4"), (), "replace_from_memory", 0, marks=long),
        # No log: all ranks go back, and the optimizer has other tensors, which are compared afterwards.
        (3, ("--die", "0@5", "--hook"), ("--verify-every", "2"), "replace_from_memory", 2),
        # The rank dies in its update, and the update of another rank breaks off.
        pytest.param(5, ("--die-late", "1@8", "--tear", "3@8"), (), "replace_from_memory", 0, marks=long),
        pytest.param(3, ("--die", "0@5"), (), "replace_from_memory", 0, marks=long),
        pytest.param(4, ("--die-late", "2@2"), (), "replace_from_memory", 0, marks=long),
        pytest.param(1, ("--die-copying", "1@4"), (), "replace_from_memory", 0, marks=long),
        pytest.param(1, ("--die-copying", "1@4", "--hook"), (), "replace_from_memory", 1, marks=long),
        pytest.param(2, ("--die", "3@5"), ("--on-fault", "restart"), "restart_from_memory", 1, marks=long),
        pytest.param(3, ("--die-all", "5"), (), "restart_from_memory", 2, marks=long),
    ],
)
def test_a_lost_shard_comes_back(
    tmp_path: Path,
    bare: Callable[..., Result],
    every: int,
    fault: tuple[str, ...],
    flags: tuple[str, ...],
    rung: str,
    again: int,
) -> None:
    got = start("holdfast", tmp_path, "--layout", "fsdp", "--memory", str(every), *fault, flags=flags)
    assert got.code == 0, got.output
    assert got.digests == bare("fsdp").digests
    assert (actions(tmp_path), lost(tmp_path)) == ([rung], [again])
    assert len(list(tmp_path.glob("runs/*/attempt-*"))) == (1 if rung.startswith("replace") else 2)
    assert not events(tmp_path, "corrupted")
    assert ("gradients are logged" in got.output) == ("--hook" in fault)


def test_a_loss_soon_after_a_recovery_finds_a_state(tmp_path: Path) -> None:
    """The replacement of rank 1 has no state of step 1. Regression: the loss of rank 0 then cost all steps."""
    done = run_job(tmp_path, 2, str(Path(__file__).with_name("lone_job.py")))
    assert done.returncode == 0 and "ends at 10: 10 steps averaged" in done.stdout, done.stdout
    assert (actions(tmp_path), lost(tmp_path)) == (["replace", "replace_from_memory"], [0, 2])


@pytest.mark.more
def test_the_others_stay_where_they_are(tmp_path: Path, bare: Callable[..., Result]) -> None:
    """The optimizer is SGD with momentum. Rank 2 dies in its update, two steps after its state in memory."""
    arguments = ("--layout", "fsdp", "--memory", "4", "--sgd", "--die-late", "2@6")
    got = start("holdfast", tmp_path, *arguments)
    assert got.code == 0, got.output
    assert got.digests == bare("fsdp", RANKS, "--sgd").digests
    assert (actions(tmp_path), lost(tmp_path)) == (["replace_from_memory"], [0])
    (verdict,) = events(tmp_path, "verdict")
    assert "make the updates up to step 7 again" in verdict["data"]["reason"]
    check_survivors(got, newcomer=2, graphs=0)


@long
def test_weights_that_the_script_changes_itself_are_in_no_log(
    tmp_path: Path, bare: Callable[..., Result]
) -> None:
    """Rank 1 dies after a step that all ranks end by clamping their weights, before its log could see the change."""
    arguments = ("--layout", "fsdp", "--memory", "3")
    got = start("holdfast", tmp_path, *arguments, "--clamp", "4", "--die", "1@5")
    assert got.code == 0, got.output
    assert got.digests == bare("fsdp", RANKS, "--clamp", "4").digests
    (refused,) = [event["data"]["reason"] for event in events(tmp_path, "state_refused")][:1]
    assert "the script has changed weights or state of the optimizer itself at step 5" in refused
    assert actions(tmp_path) == ["replace_from_memory", "restart_from_memory"]


@long
def test_a_damaged_log_is_refused_and_all_go_back(tmp_path: Path, bare: Callable[..., Result]) -> None:
    got = start("holdfast", tmp_path, "--layout", "fsdp", "--memory", "3", "--rot-log", "--die", "2@5")
    assert got.code == 0, got.output
    assert got.digests == bare("fsdp").digests
    (refused,) = [event["data"]["reason"] for event in events(tmp_path, "state_refused")]
    assert "does not fit its digest" in refused
    assert (actions(tmp_path), lost(tmp_path)) == (["replace_from_memory"] * 2, [2])


@long
def test_a_damaged_state_is_refused_and_the_disk_counts(tmp_path: Path, bare: Callable[..., Result]) -> None:
    arguments = ("--layout", "fsdp", "--memory", "1", "--save-every", "2", "--rot", "--die", "2@5")
    got = start("holdfast", tmp_path, *arguments)
    assert got.code == 0, got.output
    assert got.digests == bare("fsdp").digests
    refused = [event["data"] for event in events(tmp_path, "state_refused")]
    assert refused and all(one["rank"] == 2 and "does not fit its digest" in one["reason"] for one in refused)
    assert actions(tmp_path)[0] == "replace_from_memory" and actions(tmp_path)[-1] == "restart_checkpoint"
