"""Who is to give its state to a newcomer may be stopped: it is the one that is replaced, not the newcomer."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.session.giver_job import STEPS
from tests.session.launch import run_job

pytestmark = [pytest.mark.torch, pytest.mark.processes]


def test_a_survivor_that_is_stopped_when_it_is_asked_for_its_state_is_replaced(tmp_path: Path) -> None:
    done = run_job(tmp_path, 3, str(Path(__file__).with_name("giver_job.py")))
    assert done.returncode == 0, done.stdout
    assert (tmp_path / "stopped").exists()
    assert "rank 0: did not give its state within 15 s" in done.stdout
    assert "did not join" not in done.stdout and "0 steps lost" in done.stdout
    logs = sorted(tmp_path.glob("runs/*/attempt-*/rank-*.log"))
    ends = {line for log in logs for line in log.read_text().splitlines() if line.startswith("ends at")}
    assert len(ends) == 1 and f"ends at {STEPS}:" in ends.pop()
