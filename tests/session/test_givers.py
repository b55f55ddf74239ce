"""A survivor that is to give its state to a newcomer may be stopped: the survivor is replaced, not the newcomer.

A newcomer that has joined is a survivor of the next fault.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.session.giver_job import STEPS
from tests.session.launch import run_job

pytestmark = [pytest.mark.torch, pytest.mark.processes]


def ends(where: Path) -> set[str]:
    """Return the final lines of the ranks."""
    logs = sorted(where.glob("runs/*/attempt-*/rank-*.log"))
    return {line for log in logs for line in log.read_text().splitlines() if line.startswith("ends at")}


@pytest.mark.more
def test_a_survivor_that_is_stopped_when_it_is_asked_for_its_state_is_replaced(tmp_path: Path) -> None:
    done = run_job(tmp_path, 3, str(Path(__file__).with_name("giver_job.py")))
    assert done.returncode == 0, done.stdout
    assert (tmp_path / "stopped").exists()
    assert "rank 0: hangs: its process is stopped (state T)" in done.stdout, "seen at once, not after 15 s"
    assert "did not join" not in done.stdout and "0 steps lost" in done.stdout
    assert len(ends(tmp_path)) == 1 and f"ends at {STEPS}:" in ends(tmp_path).pop()


def test_a_newcomer_that_has_joined_gives_its_state_when_the_next_fault_comes_before_the_job_goes_on(
    tmp_path: Path,
) -> None:
    done = run_job(tmp_path, 4, str(Path(__file__).with_name("joined_job.py")))
    assert done.returncode == 0 and (tmp_path / "joined").exists(), done.stdout
    assert "did not give its state" not in done.stdout, done.stdout
    assert ", 3 faults, 0 steps lost" in done.stdout, done.stdout
    assert len(ends(tmp_path)) == 1, done.stdout


@pytest.mark.more
def test_a_newcomer_that_rehearses_holds_the_state(tmp_path: Path) -> None:
    """Regression: the newcomer was killed at the next fence, and with it the only copy of the state."""
    done = run_job(tmp_path, 2, str(Path(__file__).with_name("holder_job.py")))
    assert done.returncode == 0 and (tmp_path / "rehearsed").exists(), done.stdout
    assert ", 2 faults, 0 steps lost" in done.stdout and "restart" not in done.stdout, done.stdout
    assert len(ends(tmp_path)) == 1 and "ends at 12:" in ends(tmp_path).pop(), ends(tmp_path)


def test_a_survivor_makes_no_update_while_it_gives_its_state(tmp_path: Path) -> None:
    """Regression: the replacement read the updated weights, the copies differed, and all ranks went back."""
    done = run_job(tmp_path, 2, str(Path(__file__).with_name("tentative_job.py")))
    assert done.returncode == 0 and (tmp_path / "waited").exists(), done.stdout
    assert ", 1 fault, 0 steps lost" in done.stdout, done.stdout
    assert len(ends(tmp_path)) == 1 and "ends at 8:" in ends(tmp_path).pop(), ends(tmp_path)


def test_a_survivor_without_room_on_its_device_lives_and_gives_its_state(tmp_path: Path) -> None:
    """Regression: an error of the device in another thread ended the process, and with it the only copy."""
    done = run_job(tmp_path, 2, str(Path(__file__).with_name("full_job.py")))
    assert done.returncode == 0 and (tmp_path / "full").exists(), done.stdout
    assert ", 1 fault, 0 steps lost" in done.stdout, done.stdout
    assert "copies cannot be compared" in said(tmp_path), said(tmp_path)
    assert len(ends(tmp_path)) == 1 and "ends at 8:" in ends(tmp_path).pop()


def said(where: Path) -> str:
    """Return the output of all ranks."""
    return "".join(log.read_text() for log in sorted(where.glob("runs/*/attempt-*/rank-*.log")))
