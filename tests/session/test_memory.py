"""Pure FSDP: one rank alone holds its shards. Real kills, torn copies and flipped bits against the memory tier."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.session.test_jobs import Result, events, start

pytestmark = [pytest.mark.torch, pytest.mark.processes]
long = pytest.mark.skipif("HOLDFAST_MEMORY" not in os.environ, reason="make memory")


def lost(where: Path) -> list[int]:
    """Steps that were done again, by recovery."""
    return [event["data"]["steps_lost"] for event in events(where, "restored")][1:]


def actions(where: Path) -> list[str]:
    """Rungs taken."""
    return [event["data"]["action"] for event in events(where, "verdict")]


@pytest.mark.parametrize(
    ("every", "fault", "flags", "rung", "again"),
    [
        pytest.param(1, ("--die", "2@4"), (), "replace_from_memory", 0, marks=long),
        (3, ("--die", "0@5"), (), "replace_from_memory", 2),
        pytest.param(1, ("--die-copying", "1@4"), (), "replace_from_memory", 1, marks=long),
        pytest.param(2, ("--die", "3@5"), ("--on-fault", "restart"), "restart_from_memory", 1, marks=long),
    ],
)
def test_a_lost_shard_comes_back(
    tmp_path: Path,
    bare: Callable[[str], Result],
    every: int,
    fault: tuple[str, str],
    flags: tuple[str, ...],
    rung: str,
    again: int,
) -> None:
    got = start("holdfast", tmp_path, "--layout", "fsdp", "--memory", str(every), *fault, flags=flags)
    assert got.code == 0, got.output
    assert got.digests == bare("fsdp").digests
    assert (actions(tmp_path), lost(tmp_path)) == ([rung], [again])
    assert len(list(tmp_path.glob("runs/*/attempt-*"))) == (1 if rung.startswith("replace") else 2)


@long
def test_a_damaged_state_is_refused_and_the_disk_counts(
    tmp_path: Path, bare: Callable[[str], Result]
) -> None:
    arguments = ("--layout", "fsdp", "--memory", "1", "--save-every", "2", "--rot", "--die", "2@5")
    got = start("holdfast", tmp_path, *arguments)
    assert got.code == 0, got.output
    assert got.digests == bare("fsdp").digests
    refused = [event["data"] for event in events(tmp_path, "state_refused")]
    assert refused and all(one["rank"] == 2 and "does not fit its digest" in one["reason"] for one in refused)
    assert actions(tmp_path)[0] == "replace_from_memory" and actions(tmp_path)[-1] == "restart_checkpoint"
