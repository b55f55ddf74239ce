"""A rank whose device fails is replaced. A device that fails again is left out, and the script is not blamed."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast import event_log
from holdfast.exit_codes import Exit
from tests.session.launch import run_job

pytestmark = [pytest.mark.torch, pytest.mark.processes]

JOB = str(Path(__file__).with_name("device_job.py"))


def test_a_device_that_fails_again_costs_no_step_and_no_script_is_blamed(tmp_path: Path) -> None:
    """Regression: the run ended as failed because of the same exception twice."""
    done = run_job(tmp_path, 2, "--run-id", "it", JOB, "always")
    assert done.returncode == Exit.REQUEUE, done.stdout
    assert "left out after 2 failures: device 1 of" in done.stdout, done.stdout
    events = event_log.read(tmp_path / "runs/it/events.jsonl").events
    failed = [e.data for e in events if e.kind == "device_failed"]
    assert [(d["local_rank"], d["step"], d["certain"], d["failures"]) for d in failed] == [
        (1, 4, True, 1),
        (1, 4, True, 2),
    ]
    assert [e.data["kind"] for e in events if e.kind == "detected"] == ["device", "device"]
    assert any(e.kind == "sealed" and e.data["step"] == 4 for e in events), "what is committed is saved"


@pytest.mark.more
def test_a_device_that_fails_once_is_used_again(tmp_path: Path) -> None:
    done = run_job(tmp_path, 2, JOB, "once")
    assert done.returncode == 0 and ", 1 fault, 0 steps lost" in done.stdout, done.stdout
