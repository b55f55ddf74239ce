"""Seed 003, PyTorch chapter: the script's own checkpoints, its start script, and a killed worker."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from tests.frameworks.started import BOUND_S, Started, kill_rank, log_of

SAMPLE = Path(__file__).parent / "003_resumable"
pytestmark = [pytest.mark.torch, pytest.mark.processes, pytest.mark.timeout(2 * BOUND_S)]


def train(folder: Path, lose: str = "") -> str:
    """Run the start script to its end.

    Rank 1 is killed when it has printed ``lose``. Return the output of all ranks.
    """
    shutil.copytree(SAMPLE, folder)
    run = folder / "runs" / "t"
    with Started(folder, "bash", "train_start.sh", "t", env={"OMP_NUM_THREADS": "1"}) as job:
        if lose:
            job.wait_said(lose, log_of(run, 1))
            kill_rank(run, 1)
        assert job.wait() == 0, job.output
    return "".join(path.read_text() for path in sorted(run.glob("attempt-*/rank-*.log")))


def test_a_killed_worker_changes_nothing(tmp_path: Path) -> None:
    undisturbed = train(tmp_path / "undisturbed")
    assert "no valid ckpt found to resume." in undisturbed and "loaded checkpoint" not in undisturbed
    disturbed = train(tmp_path / "disturbed", lose="Epoch: [3][1/")
    assert "=> loaded checkpoint './rank_0/model_best.pth.tar'" in disturbed
    for rank in (0, 1):
        values = [torch.load(tmp_path / name / f"final-{rank}.pt") for name in ("undisturbed", "disturbed")]
        assert all(torch.equal(value, values[1][name]) for name, value in values[0].items())
