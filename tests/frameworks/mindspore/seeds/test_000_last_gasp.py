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
SAVED = "ttp_checkpoints/tft_saved_checkpoints-step_*/rank_0/ttp_rank_0-*.ckpt"
pytestmark = [pytest.mark.timeout(5 * BOUND_S), pytest.mark.usefixtures("drop_in")]


def sample(folder: Path) -> Path:
    """Copy the document's directory and add the data set."""
    copied("000_last_gasp", folder)
    write_mnist(folder / "MNIST_Data", IMAGES)
    return folder


def log(folder: Path, rank: int) -> str:
    """Return the output of a worker."""
    return (folder / "msrun_log" / f"worker_{rank}.log").read_text()


def train(folder: Path, script: str, env: dict[str, str]) -> str:
    """Run a start script until its workers end. Return the output of rank 0."""
    with Started(folder, "bash", script, env=env) as job:
        job.wait_workers()
        return log(folder, 0)


def interrupted(folder: Path, script: str, text: str) -> tuple[int, int]:
    """Run a start script, and kill rank 1 when it has printed ``text``.

    Return epoch and step of the dying checkpoint.
    """
    before = set(folder.glob(SAVED))
    with Started(folder, "bash", script, env=SEEDED) as job:
        job.wait_said(text, folder / "msrun_log" / "worker_1.log")
        (pid,) = processes(folder, MS_ROLE="MS_WORKER", MS_NODE_ID="1")
        os.kill(pid, signal.SIGKILL)
        job.wait_workers()
    (saved,) = set(folder.glob(SAVED)) - before
    epoch, step = (int(found) for found in re.findall(r"\d+", saved.stem)[1:])
    return epoch, step


def set_to(folder: Path, epoch: int, step: int) -> None:
    """Do as the document says: set `cur_epoch` and `cur_step` to the values of the exception save."""
    case = folder / "mindio_ttp_case.py"
    text = re.sub(r"cur_epoch = \d+ ", f"cur_epoch = {epoch} ", case.read_text())
    case.write_text(re.sub(r"cur_step = \d+ ", f"cur_step = {step} ", text))


def test_two_killed_workers_cost_nothing_with_is_recover(tmp_path: Path) -> None:
    undisturbed = sample(tmp_path / "undisturbed")
    assert f"epoch: {EPOCHS} step: {STEPS}, loss is" in train(undisturbed, "msrun.sh", SEEDED)
    folder = sample(tmp_path / "disturbed")
    set_to(folder, *interrupted(folder, "msrun.sh", "epoch: 2 step: 3,"))
    epoch, step = interrupted(folder, "msrun-resume.sh", "epoch: 4 step: 3,")
    assert epoch == 4
    set_to(folder, epoch, step)
    said = train(folder, "msrun-resume.sh", SEEDED)
    seen = [(int(e) - 1) * STEPS + int(s) for e, s in re.findall(r"epoch: (\d+) step: (\d+), loss", said)]
    assert seen == list(range((epoch - 1) * STEPS + step + 1, EPOCHS * STEPS + 1))
    for rank in (0, 1):
        assert same(undisturbed / f"final-{rank}.ckpt", folder / f"final-{rank}.ckpt")


@pytest.mark.smoke
def test_replicas_that_start_different_are_made_equal(tmp_path: Path) -> None:
    folder = sample(tmp_path)
    said = train(folder, "msrun.sh", {})
    assert f"epoch: {EPOCHS} step: {STEPS}, loss is" in said, said[-2000:]
    assert same(folder / "final-0.ckpt", folder / "final-1.ckpt")
