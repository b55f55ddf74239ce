"""A collective after a block is one of all ranks only if the block has committed; a script need not ask."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast import event_log
from tests.session.launch import run_job

pytestmark = [pytest.mark.torch, pytest.mark.processes]

JOB = str(Path(__file__).with_name("sums_job.py"))


def trained(where: Path, *victims: str) -> str:
    """Train three ranks, and return the weights and the last sum as text."""
    where.mkdir()
    done = run_job(where, 3, "--run-id", "it", JOB, str(where / "result"), ",".join(victims))
    assert done.returncode == 0, done.stdout
    found = event_log.read(where / "runs/it/events.jsonl").events
    assert [e.data["action"] for e in found if e.kind == "verdict"] == ["replace"] * len(victims), done.stdout
    return (where / "result").read_text()


def test_a_sum_after_each_block_survives_a_killed_rank(tmp_path: Path) -> None:
    """Regression, found with timm's training script.

    Survivors summed after the aborted block, met the gradients of the replacement, and gloo ended their processes.
    """
    undisturbed = trained(tmp_path / "undisturbed")
    assert trained(tmp_path / "disturbed", "1@4", "0@6") == undisturbed
