"""Seed 000: a worker is killed, a dying checkpoint is written, ``--is_recover=1`` resumes from it."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest

from tests.frameworks.mindspore.seeds.data import write_mnist
from tests.frameworks.mindspore.seeds.samples import copied, same
from tests.frameworks.started import BOUND_S, Started, processes

IMAGES = 1600
STEPS = IMAGES // 32
"""Of an epoch: every worker reads all images, as in the document."""

EPOCHS = 5
SEEDED = {"SEEDED": "1"}
pytestmark = [pytest.mark.timeout(4 * BOUND_S), pytest.mark.usefixtures("drop_in")]


def sample(folder: Path) -> Path:
    """The document's directory, data set included."""
    copied("000_last_gasp", folder)
    write_mnist(folder / "MNIST_Data", IMAGES)
    return folder


def log(folder: Path, rank: int) -> str:
    """What a worker printed."""
    return (folder / "msrun_log" / f"worker_{rank}.log").read_text()


def train(folder: Path, script: str, env: dict[str, str]) -> str:
    """Run a start script until its workers end; what rank 0 printed."""
    with Started(folder, "bash", script, env=env) as job:
        job.wait_workers()
        return log(folder, 0)


def test_a_killed_worker_costs_nothing_with_is_recover(tmp_path: Path) -> None:
    undisturbed = sample(tmp_path / "undisturbed")
    assert f"epoch: {EPOCHS} step: {STEPS}, loss is" in train(undisturbed, "msrun.sh", SEEDED)
    folder = sample(tmp_path / "disturbed")
    with Started(folder, "bash", "msrun.sh", env=SEEDED) as job:
        job.wait_said("epoch: 2 step: 3,", folder / "msrun_log" / "worker_1.log")
        (pid,) = processes(folder, MS_ROLE="MS_WORKER", MS_NODE_ID="1")
        os.kill(pid, signal.SIGKILL)
        job.wait_workers()
    assert not list(folder.glob("final-*"))
    (saved,) = folder.glob("ttp_checkpoints/tft_saved_checkpoints-step_*/rank_0/ttp_rank_0-*.ckpt")
    epoch, step = (int(found) for found in re.findall(r"\d+", saved.stem)[1:])
    case = (
        folder / "mindio_ttp_case.py"
    )  # the document: set to the epoch and step values of the exception save
    text = case.read_text().replace("cur_epoch = 2 ", f"cur_epoch = {epoch} ")
    case.write_text(text.replace("cur_step = 1215 ", f"cur_step = {step} "))
    said = train(folder, "msrun-resume.sh", SEEDED)
    assert len(re.findall("loss is", said)) == EPOCHS * STEPS - (epoch - 1) * STEPS - step, said[-2000:]
    for rank in (0, 1):
        assert same(undisturbed / f"final-{rank}.ckpt", folder / f"final-{rank}.ckpt")


def test_replicas_that_start_different_are_made_equal(tmp_path: Path) -> None:
    folder = sample(tmp_path)
    said = train(folder, "msrun.sh", {})
    assert f"epoch: {EPOCHS} step: {STEPS}, loss is" in said, said[-2000:]
    assert same(folder / "final-0.ckpt", folder / "final-1.ckpt")
