"""Seed 003, Pangu chapter: a rank is killed, then the job is ended; the script's own checkpoints stay beside."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.frameworks.mindspore.seeds.samples import copied, same
from tests.frameworks.started import BOUND_S, Started, kill_rank, log_of

pytestmark = pytest.mark.timeout(3 * BOUND_S)


def started(folder: Path, name: str) -> Started:
    """Start the training under `holdfast run` with two workers."""
    options = ("--run-id", name, "--framework", "mindspore", "--nproc-per-node", "2")
    return Started(folder, "holdfast", "run", *options, "train.py")


def test_a_killed_rank_and_a_stop_change_nothing(tmp_path: Path) -> None:
    undisturbed = copied("003_pangu", tmp_path / "undisturbed")
    with started(undisturbed, "a") as job:
        assert job.wait() == 0, job.output
    assert "so skip the loading" in log_of(undisturbed / "runs" / "a", 0).read_text()
    folder = copied("003_pangu", tmp_path / "disturbed")
    run = folder / "runs" / "a"
    with started(folder, "a") as job:
        job.wait_said("epoch: 1 step: 5, loss is", log_of(run, 1))
        kill_rank(run, 1)
        job.wait_said("epoch: 2 step: 5, loss is", log_of(run, 0, 1))
        job.process.send_signal(signal.SIGTERM)
        assert job.wait() == 75, job.output
        assert "0 steps lost" in job.output
    with started(folder, "b") as job:
        assert job.wait() == 0, job.output
        assert "resumed at step" in job.output
    said = log_of(folder / "runs" / "b", 0).read_text()
    assert "Start to load from ./8p/rank_0/pangu0" in said, said[-3000:]
    for rank in (0, 1):
        assert same(undisturbed / f"final-{rank}.ckpt", folder / f"final-{rank}.ckpt")
