"""Ranks whose model is not wrapped for data parallelism."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.exit_codes import Exit
from tests.session.launch import run_job

pytestmark = [pytest.mark.torch, pytest.mark.processes]

JOB = str(Path(__file__).with_name("alone_job.py"))


def test_ranks_that_train_alone_are_named_as_that(tmp_path: Path) -> None:
    """Regression: such ranks were reported as having a wrong copy of the state."""
    done = run_job(tmp_path, 2, JOB)
    assert done.returncode == Exit.BAD_INPUT, done.stdout
    assert "each of 2 ranks trains alone" in done.stdout, done.stdout
    error = done.stdout.partition("error: ")[2]
    assert "DistributedDataParallel(model)" in error and "wrong copy" not in error, done.stdout
    assert "wrong copy" not in done.stdout and "F003" not in done.stdout, done.stdout
