"""Seed 003, MindSpore chapter: the job is ended by SIGTERM; the next start skips a damaged file and resumes exactly."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.frameworks.mindspore.seeds.samples import copied, same
from tests.frameworks.started import BOUND_S, Started, log_of

pytestmark = pytest.mark.timeout(3 * BOUND_S)


def sample(folder: Path) -> Path:
    """Copy the document's directory, with the files that it takes from seed 004."""
    copied("004_parallel", folder)
    return copied("003_resumable", folder)


def started(folder: Path, name: str, cifar10: Path) -> Started:
    """Start the training under `holdfast run` with two workers."""
    env = {"DATA_PATH": str(cifar10), "EXECUTE_PATH": str(folder)}
    options = ("--run-id", name, "--framework", "mindspore", "--rank-table", "rank_table_2pcs.json")
    return Started(folder, "holdfast", "run", *options, "train.py", env=env)


def test_taken_away_and_resumed(tmp_path: Path, cifar10: Path) -> None:
    undisturbed = sample(tmp_path / "undisturbed")
    with started(undisturbed, "a", cifar10) as job:
        assert job.wait() == 0, job.output
    assert "There is not ckpt file: ./output/ckpt" in log_of(undisturbed / "runs" / "a", 0).read_text()
    folder = sample(tmp_path / "disturbed")
    with started(folder, "a", cifar10) as job:
        job.wait_said("epoch: 3 step: 1, loss is", log_of(folder / "runs" / "a", 0))
        job.process.send_signal(signal.SIGTERM)  # as a scheduler does when it takes the node
        assert job.wait() == 75, job.output
    (folder / "output" / "ckpt_0" / "resnet50-9_9.ckpt").write_bytes(b"\x0a\xff\xff cut off")
    with started(folder, "b", cifar10) as job:
        assert job.wait() == 0, job.output
        assert "resumed at step" in job.output
    said = log_of(folder / "runs" / "b", 0).read_text()
    assert "resnet50-9_9.ckpt format is incorrect, try to load the last most recent ckpt" in said
    assert "Pre trained ckpt mode: ./output/ckpt_" in said
    for rank in (0, 1):
        assert same(undisturbed / f"final-{rank}.ckpt", folder / f"final-{rank}.ckpt")
