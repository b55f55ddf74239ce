"""Gradient accumulation over several batches of the loader, in the styles of accelerate and Fabric."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.frameworks.faces.running import run

JOB = Path(__file__).with_name("accumulation_job.py")
LAUNCH = ["holdfast", "run"]


def ends(where: Path, *arguments: str) -> tuple[list[str], str]:
    """Run a job of two ranks. Return the final values of each rank, and the output."""
    code, output = run(where, LAUNCH, JOB, *arguments, ranks=2)
    assert code == 0, output
    logs = sorted(where.glob("runs/*/attempt-*/rank-*.log"))
    lines = [line for log in logs for line in log.read_text().splitlines() if " ends with " in line]
    assert len(lines) == 2, output
    return sorted(lines), output


@pytest.mark.parametrize("way", ["accelerate", "fabric"])
def test_a_kill_in_the_middle_of_a_step_repeats_all_of_its_batches(tmp_path: Path, way: str) -> None:
    """Step 4 has all batches. Step 2 is the last step of an epoch and has two batches only."""
    calm, _ = ends(tmp_path / "calm", way)
    for kill in ("2", "4"):
        told, output = ends(tmp_path / kill, way, kill)
        assert told == calm and "0 steps lost" in output, output


def test_one_batch_in_each_turn_is_refused_with_the_way(tmp_path: Path) -> None:
    code, output = run(tmp_path, LAUNCH, JOB, "accelerate-turns", ranks=2)
    assert code == 3 and "s.steps(loader, batches=4)" in output, output
