"""Models that are trained in turns: a replacement has the buckets of its peers, whichever loop it joins."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.session.launch import run_job

pytestmark = [pytest.mark.torch, pytest.mark.processes]

JOB = str(Path(__file__).with_name("folds_job.py"))


def ends(where: Path, *kills: str) -> list[str]:
    """Run the job, and return the final weights of its ranks."""
    where.mkdir()
    done = run_job(where, 2, JOB, *kills)
    assert done.returncode == 0, done.stdout
    assert not kills or ", 0 steps lost" in done.stdout, done.stdout
    logs = sorted(where.glob("runs/*/attempt-*/rank-*.log"))
    lines = {line for log in logs for line in log.read_text().splitlines() if " ends with " in line}
    assert len(lines) == 2, done.stdout
    return sorted(lines)


def test_kills_in_the_loops_of_two_models(tmp_path: Path) -> None:
    """Regression: in the first step of a model, and in the next loop of the other one, gloo received other sizes."""
    calm = ends(tmp_path / "calm")
    assert ends(tmp_path / "first", "1:3") == calm
    assert ends(tmp_path / "later", "1:4", "0:7") == calm
