"""Sessions that the script opens without ``with``, and whose end the script does not announce.

Regression: the exception of another rank's loss reached no session, so the steps since the last checkpoint were lost.
A script that ended without a call of ``__exit__`` wrote no final checkpoint: with exit code 0 under torchrun, and as
a repeated loss of the rank under ``holdfast run``.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from holdfast.exit_codes import Exit
from holdfast.store.manage.checkpoint_root import Root
from tests.session.launch import ROOT, run_job, run_torchrun

pytestmark = [pytest.mark.torch, pytest.mark.processes]

JOB = str(Path(__file__).with_name("opened_job.py"))
OPEN = "the script has ended, and its session is still open"


def results(where: Path) -> Mapping[str, str]:
    """Return the weights that each rank has written at its end."""
    return {path.name: path.read_text() for path in where.glob("ended-*")}


def saved(where: Path) -> list[int]:
    """Return the steps of the valid checkpoints, oldest first."""
    return sorted(found.step for found in Root(where / "ckpt").list() if found.valid)


@pytest.fixture(scope="module")
def left_by_hand(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, str]:
    """Return the results of a job that leaves its session by a call."""
    where = tmp_path_factory.mktemp("close")
    done = run_job(where, 2, JOB, "close")
    assert done.returncode == 0 and saved(where) == [12], done.stdout
    return results(where)


@pytest.mark.parametrize("end", ["", "kill", "raise", "exit"])
def test_a_session_left_open_ends_as_with_does(
    tmp_path: Path, left_by_hand: Mapping[str, str], end: str
) -> None:
    done = run_job(tmp_path, 2, JOB, end)
    assert done.returncode == 0 and results(tmp_path) == left_by_hand, done.stdout
    assert saved(tmp_path) == ([6, 12] if end else [12])
    assert not end or "1 fault, 0 steps lost" in done.stdout, done.stdout


@pytest.mark.parametrize("end", ["", "raise", pytest.param("exit", marks=pytest.mark.more)])
def test_without_the_launcher_an_open_session_ends_with_a_save_and_an_error(tmp_path: Path, end: str) -> None:
    done = run_torchrun(tmp_path, 2, JOB, end)
    assert done.returncode != 0, done.stdout
    assert saved(tmp_path) == [6 if end else 12]
    assert ("ValueError: a defect" if end == "raise" else OPEN) in done.stdout


def run_alone(where: Path, end: str) -> subprocess.CompletedProcess[str]:
    """Run the job as one process without a launcher."""
    return subprocess.run(
        [sys.executable, JOB, end],
        cwd=where,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("end", ["", "raise", "exit"])
def test_one_process_with_an_open_session_saves_and_ends_with_an_error(tmp_path: Path, end: str) -> None:
    done = run_alone(tmp_path, end)
    assert done.returncode == (1 if end == "raise" else Exit.BAD_INPUT), done.stderr
    assert saved(tmp_path) == [6 if end else 12]
    assert ("ValueError: a defect" if end == "raise" else OPEN) in done.stderr


def test_a_forked_child_leaves_the_session_of_its_parent_alone(tmp_path: Path) -> None:
    done = run_alone(tmp_path, "fork")
    assert done.returncode == 0 and OPEN not in done.stderr, done.stderr
    assert saved(tmp_path) == [12]
