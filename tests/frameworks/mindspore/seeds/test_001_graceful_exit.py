"""Seed 001: the file requests an exit at once; all processes save that step and exit; the next start continues."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.frameworks.mindspore.seeds.data import write_mnist
from tests.frameworks.mindspore.seeds.samples import copied, same, weights
from tests.frameworks.started import BOUND_S, Started, log_of

IMAGES = 512
STEPS = IMAGES // 32
pytestmark = [pytest.mark.timeout(4 * BOUND_S), pytest.mark.usefixtures("drop_in")]


def ask(folder: Path, value: int) -> None:
    """Request an exit as a health monitor does, or withdraw the request."""
    (folder / "graceful_exit.json").write_text(json.dumps({"GracefulExit": value}))


def by_train_sh(folder: Path) -> str:
    """Run the document's start script. Return the output of rank 1."""
    with Started(folder, "bash", "train.sh", env={"DATASET_PATH": str(folder / "MNIST_Data")}) as job:
        assert job.wait() == 0, job.output
    return (folder / "comm_subgraph_logs" / "worker_1.log").read_text()


def by_holdfast_run(folder: Path) -> str:
    """Run the same script under `holdfast run`. Return the output of rank 1."""
    env = {"DATASET_PATH": str(folder / "MNIST_Data"), "MS_ENABLE_GRACEFUL_EXIT": "1"}
    name = f"t{len(list(folder.glob('runs/*')))}"
    options = ("--run-id", name, "--framework", "mindspore", "--nproc-per-node", "2")
    with Started(folder, "holdfast", "run", *options, "graceful_exit.py", env=env) as job:
        assert job.wait() == 0, job.output
    return log_of(folder / "runs" / name, 1).read_text()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = copied("001_graceful_exit", tmp_path_factory.mktemp("undisturbed"))
    write_mnist(folder / "MNIST_Data", IMAGES)
    ask(folder, 0)
    assert f"epoch: 1 step: {STEPS}, loss is" in by_train_sh(folder)
    return folder


@pytest.mark.parametrize("start", [by_train_sh, by_holdfast_run])
def test_asked_at_the_first_step_and_continued(
    tmp_path: Path, undisturbed: Path, start: Callable[[Path], str]
) -> None:
    folder = copied("001_graceful_exit", tmp_path)
    write_mnist(folder / "MNIST_Data", IMAGES)
    said = start(folder)
    assert "Graceful exit is triggered, stop training" in said, said[-2000:]
    assert re.findall(r"epoch: 1 step: (\d+), loss is", said) == ["1"]
    for rank in (0, 1):
        assert weights(folder / f"rank_{rank}" / "LeNet_train.ckpt")["step_num"] == 1
        assert (folder / f"rank_{rank}" / "LeNet_train.mindir").stat().st_size > 0
    ask(folder, 0)
    said = start(folder)
    assert len(re.findall("loss is", said)) == STEPS - 1, said[-2000:]
    for rank in (0, 1):
        assert same(undisturbed / f"final-{rank}.ckpt", folder / f"final-{rank}.ckpt")
