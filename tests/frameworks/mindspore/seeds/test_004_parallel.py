"""Seed 004: ResNet on CIFAR-10 and LeNet on MNIST with the document's random operations, and its start scripts."""

from __future__ import annotations

import os
import re
import shutil
import signal
from pathlib import Path

import pytest

from tests.frameworks.launched import until
from tests.frameworks.mindspore.seeds.data import write_mnist
from tests.frameworks.mindspore.seeds.samples import copied, same
from tests.frameworks.started import BOUND_S, Started, kill_rank, log_of, processes

IMAGES, RANKS = 512, 2
STEPS = 4
"""Of an epoch of the ResNet, which reads 128 images of its shard."""

EPOCHS = 4
TABLE = "rank_table_2pcs.json"
MPIRUN = shutil.which("mpirun")
LENET, RESNET = "lenet_distributed_training.py", "resnet50_distributed_training.py"
pytestmark = pytest.mark.timeout(4 * BOUND_S)


def sample(folder: Path) -> Path:
    """Copy the document's directories and add the data sets."""
    copied("001_graceful_exit", folder)
    copied("004_parallel", folder)
    write_mnist(folder / "MNIST_Data", IMAGES)
    return folder


def variables(folder: Path, cifar10: Path) -> dict[str, str]:
    """Return the variables that the samples read."""
    mnist = str(folder / "MNIST_Data")
    return {"DATASET_PATH": mnist, "DATA_PATH": str(cifar10), "EXECUTE_PATH": str(folder)}


def launched(folder: Path, script: str, cifar10: Path, lose: str = "") -> Path:
    """Run a script under `holdfast run`. Rank 1 is killed when it has printed ``lose``."""
    run = folder / "runs" / "t"
    command = ("holdfast", "run", "--run-id", "t", "--framework", "mindspore", "--rank-table", TABLE, script)
    with Started(sample(folder), *command, env=variables(folder, cifar10)) as job:
        if lose:
            job.wait_said(lose, log_of(run, 1))
            kill_rank(run, 1)
        assert job.wait() == 0, job.output
        assert (", 0 steps lost" in job.output) == bool(lose), job.output
    return folder


@pytest.fixture(scope="module")
def resnet(tmp_path_factory: pytest.TempPathFactory, cifar10: Path) -> Path:
    """Run the ResNet without a fault."""
    return launched(tmp_path_factory.mktemp("resnet"), RESNET, cifar10)


def check(undisturbed: Path, folder: Path) -> None:
    """Check that both ranks end with the weights of the undisturbed run."""
    for rank in range(RANKS):
        assert same(undisturbed / f"final-{rank}.ckpt", folder / f"final-{rank}.ckpt")


@pytest.mark.parametrize("script", [RESNET, LENET])
def test_a_lost_rank_changes_nothing(
    tmp_path: Path, script: str, cifar10: Path, request: pytest.FixtureRequest
) -> None:
    if script == RESNET:
        undisturbed = request.getfixturevalue("resnet")
    else:
        undisturbed = launched(tmp_path / "undisturbed", script, cifar10)
    disturbed = launched(tmp_path / "disturbed", script, cifar10, lose="epoch: 2 step: 3, loss is")
    check(undisturbed, disturbed)


def test_each_rank_has_the_documents_checkpoint(resnet: Path) -> None:
    for rank in range(RANKS):
        (saved,) = resnet.glob(f"ckpt_{rank}/data_parallel*.ckpt")
        assert saved.stem == f"data_parallel-{EPOCHS}_{STEPS}"
        assert same(saved, resnet / f"ckpt_0/{saved.name}")


def kill_in_second_epoch(folder: Path, log: Path, variable: str) -> None:
    """Kill rank 1, which the variable identifies, with SIGKILL in the second epoch of its log."""
    until("the second epoch", lambda: log.exists() and "epoch: 2 step: 3," in log.read_text(), BOUND_S)
    for pid in processes(folder, **{variable: "1"}):
        if b"train_cifar\0" not in Path(f"/proc/{pid}/cmdline").read_bytes():
            os.kill(pid, signal.SIGKILL)


def test_run_sh_starts_again_after_a_lost_rank(tmp_path: Path, resnet: Path, cifar10: Path) -> None:
    command = ("bash", "run.sh", str(cifar10), str(RANKS))
    with Started(sample(tmp_path), *command, env=variables(tmp_path, cifar10)) as job:
        kill_in_second_epoch(tmp_path, tmp_path / "device1" / "train.log1", "RANK_ID")
        assert job.wait() == 2 and "training failed" in job.output
        until("all ranks end", lambda: not processes(tmp_path, RANK_ID="1"), BOUND_S)
    with Started(tmp_path, *command, env=variables(tmp_path, cifar10)) as job:
        assert job.wait() == 0 and "training success" in job.output, job.output
        until("all ranks end", lambda: not processes(tmp_path, RANK_ID="1"), BOUND_S)
    said = (tmp_path / "device0" / "train.log0").read_text()
    assert 0 < len(re.findall("loss is", said)) < EPOCHS * STEPS, said[-2000:]
    check(resnet, tmp_path)


def test_run_cluster_sh_makes_one_job(tmp_path: Path, resnet: Path, cifar10: Path) -> None:
    command = ("bash", "run_cluster.sh", str(cifar10), str(tmp_path / TABLE), str(RANKS), "0")
    with Started(sample(tmp_path), *command, env=variables(tmp_path, cifar10)) as job:
        assert job.wait() == 0
        until("all ranks end", lambda: not any(processes(tmp_path, RANK_ID=rank) for rank in "01"), BOUND_S)
    check(resnet, tmp_path)


@pytest.mark.skipif(MPIRUN is None, reason="needs mpirun")
def test_mpirun_ends_with_the_weights_of_holdfast_run(tmp_path: Path, resnet: Path, cifar10: Path) -> None:
    """Each rank may use all processors, as under `holdfast run`: MindSpore divides its sums by their number."""
    options = ("--allow-run-as-root", "--oversubscribe", "--bind-to", "none")
    command = ("mpirun", *options, "-n", str(RANKS), "pytest", "-s", RESNET)
    with Started(sample(tmp_path), *command, env=variables(tmp_path, cifar10)) as job:
        assert job.wait() == 0, job.output[-2000:]
    check(resnet, tmp_path)
