"""The code of a script after its session is also protected: it is run again from the final checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.session.launch import run_job

pytestmark = [pytest.mark.torch, pytest.mark.processes]

JOB = str(Path(__file__).with_name("after_job.py"))


def events(where: Path, kind: str) -> list[dict[str, Any]]:
    """Return the data of the events of one kind."""
    lines = (json.loads(line) for line in (where / "runs/it/events.jsonl").read_text().splitlines())
    return [e["data"] for e in lines if e["kind"] == kind]


def test_a_death_after_the_training_is_named_and_what_follows_is_repeated(tmp_path: Path) -> None:
    done = run_job(tmp_path, 2, "--run-id", "it", JOB, "kill", str(tmp_path / "model.pt"))
    assert done.returncode == 0, done.stdout
    (fault,) = events(tmp_path, "detected")
    assert (fault["rank"], fault["kind"], fault["phase"]) == (1, "signal", "after")
    assert "rank 1: was killed by signal 9 (SIGKILL), after the training, at step 5" in done.stdout
    log = (tmp_path / "runs/it/attempt-001/rank-00000.log").read_text()
    assert "exported in life 1" in log and "trained step" not in log
    assert [e["steps_lost"] for e in events(tmp_path, "recovered")] == [0]


def test_an_exception_after_the_training_that_comes_again_ends_the_run_with_its_cause(tmp_path: Path) -> None:
    done = run_job(tmp_path, 2, "--run-id", "it", JOB, "raise", str(tmp_path / "model.pt"))
    assert done.returncode == 1, done.stdout
    assert [e["rank"] for e in events(tmp_path, "detected")] == [1, 1], "rank 0 is not blamed"
    assert "ValueError: no test data" in events(tmp_path, "run_ended")[0]["reason"]
