"""Seed 003, TensorFlow chapter: the script's own checkpoints, and a killed worker, after which all workers restart."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from tests.frameworks.started import BOUND_S, Started, kill_rank, log_of

SAMPLE = Path(__file__).parent / "003_resumable"
pytestmark = pytest.mark.timeout(2 * BOUND_S)


def train(folder: Path, lose: str = "") -> str:
    """Run the script to its end. Rank 1 is killed when it has printed ``lose``. Return the output of all ranks."""
    shutil.copytree(SAMPLE, folder)
    run = folder / "runs" / "t"
    options = ("--run-id", "t", "--framework", "tensorflow", "--nproc-per-node", "2", "--max-restarts", "5")
    with Started(folder, "holdfast", "run", *options, "resnet_ctl.py") as job:
        if lose:
            job.wait_said(lose, log_of(run, 1))
            kill_rank(run, 1)
        assert job.wait() == 0, job.output
    return "".join(path.read_text() for path in sorted(run.glob("attempt-*/rank-*.log")))


def test_a_killed_worker_changes_nothing(tmp_path: Path) -> None:
    undisturbed = train(tmp_path / "undisturbed")
    assert "loading checkpoint None" in undisturbed and "Saved checkpoints in models/device0" in undisturbed
    disturbed = train(tmp_path / "disturbed", lose="step 25 loss")
    assert "loading checkpoint models/device0/ckpt-20" in disturbed, disturbed[-3000:]
    for rank in (0, 1):
        one, other = (np.load(tmp_path / name / f"final-{rank}.npz") for name in ("undisturbed", "disturbed"))
        assert all(one[key].tobytes() == other[key].tobytes() for key in one.files)
