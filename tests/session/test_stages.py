"""A lost stage of a pipeline without copies: only its own state in memory, from an earlier step, has its tensors."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.session.launch import run_job
from tests.session.test_jobs import events

pytestmark = [pytest.mark.torch, pytest.mark.processes]

JOB = str(Path(__file__).with_name("stages_job.py"))


def trained(where: Path) -> list[str]:
    """Run the job. Return the final values of each rank."""
    where.mkdir(exist_ok=True)
    done = run_job(where, 2, JOB)
    assert done.returncode == 0, done.stdout
    return [path.read_text() for path in sorted(where.glob("ended-*"))]


def test_a_lost_stage_makes_its_updates_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calm = trained(tmp_path / "calm")
    monkeypatch.setenv("KILL", "0:5,1:8")
    assert trained(tmp_path / "struck") == calm
    assert [e["data"]["action"] for e in events(tmp_path / "struck", "verdict")] == [
        "replace_from_memory"
    ] * 2
    assert [e["data"]["steps_lost"] for e in events(tmp_path / "struck", "restored")][1:] == [0, 0]
