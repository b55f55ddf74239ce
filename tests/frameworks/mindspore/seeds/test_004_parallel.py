"""Seed 004: ResNet on CIFAR-10 and LeNet on MNIST with the document's random operations, and its start scripts."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest

from tests.frameworks.launched import Launched, until
from tests.frameworks.mindspore.seeds.data import write_cifar10, write_mnist
from tests.frameworks.mindspore.seeds.samples import copied, same
from tests.frameworks.mindspore.started import BOUND_S, Started, processes

CIFAR = "cifar-10-batches-bin"
IMAGES, RANKS = 512, 2
STEPS = IMAGES // 32 // RANKS
"""Of an epoch of the ResNet, which reads its shard."""

EPOCHS = 4
RUN = ("--framework", "mindspore", "--nproc-per-node", str(RANKS))
LENET, RESNET = "lenet_distributed_training.py", "resnet50_distributed_training.py"
pytestmark = pytest.mark.timeout(4 * BOUND_S)


def sample(folder: Path) -> Path:
    """The document's directory, data sets included."""
    copied("001_graceful_exit", folder)
    copied("004_parallel", folder)
    write_mnist(folder / "MNIST_Data", IMAGES)
    write_cifar10(folder / CIFAR, IMAGES)
    return folder


def variables(folder: Path) -> dict[str, str]:
    """What the samples read from the environment."""
    return {
        "DATASET_PATH": str(folder / "MNIST_Data"), "DATA_PATH": str(folder / CIFAR), "EXECUTE_PATH": str(folder),
    }  # fmt: skip


def launched(folder: Path, script: str, lose: str = "") -> Path:
    """Under `holdfast run`; rank 1 is killed when it has printed ``lose``."""
    with Launched(sample(folder), *RUN, script, env=variables(folder)) as run:
        if lose:
            run.wait_log(lose, rank=1)
            run.kill(1)
        assert run.wait() == 0, run.output + run.logs()[-2000:]
        assert ("1 fault, 0 steps lost" in run.output) == bool(lose), run.output
    return folder


@pytest.fixture(scope="module")
def resnet(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The undisturbed run of the ResNet."""
    return launched(tmp_path_factory.mktemp("resnet"), RESNET)


def check(undisturbed: Path, folder: Path) -> None:
    """Both ranks end with the weights of the undisturbed run."""
    for rank in range(RANKS):
        assert same(undisturbed / f"final-{rank}.ckpt", folder / f"final-{rank}.ckpt")


@pytest.mark.parametrize("script", [RESNET, LENET])
def test_a_lost_rank_changes_nothing(tmp_path: Path, script: str, request: pytest.FixtureRequest) -> None:
    if script == RESNET:
        undisturbed = request.getfixturevalue("resnet")
    else:
        undisturbed = launched(tmp_path / "undisturbed", script)
    disturbed = launched(tmp_path / "disturbed", script, lose="epoch: 2 step: 3, loss is")
    check(undisturbed, disturbed)


def test_each_rank_has_the_documents_checkpoint(resnet: Path) -> None:
    for rank in range(RANKS):
        (saved,) = resnet.glob(f"ckpt_{rank}/data_parallel*.ckpt")
        assert saved.stem == f"data_parallel-{EPOCHS}_{STEPS}"
        assert same(saved, resnet / f"ckpt_0/{saved.name}")


def kill_in_second_epoch(folder: Path, log: Path, variable: str) -> None:
    """SIGKILL to the process of rank 1, which the variable names, in the second epoch of its log."""
    until("the second epoch", lambda: log.exists() and "epoch: 2 step: 3," in log.read_text(), BOUND_S)
    for pid in processes(folder, **{variable: "1"}):
        if b"train_cifar\0" not in Path(f"/proc/{pid}/cmdline").read_bytes():
            os.kill(pid, signal.SIGKILL)


def test_run_sh_starts_again_after_a_lost_rank(tmp_path: Path, resnet: Path) -> None:
    command = ("bash", "run.sh", str(tmp_path / CIFAR), str(RANKS))
    with Started(sample(tmp_path), *command, env=variables(tmp_path)) as job:
        kill_in_second_epoch(tmp_path, tmp_path / "device1" / "train.log1", "RANK_ID")
        assert job.wait() == 2 and "training failed" in job.output
        until("all ranks end", lambda: not processes(tmp_path, RANK_ID="1"), BOUND_S)
    with Started(tmp_path, *command, env=variables(tmp_path)) as job:
        assert job.wait() == 0 and "training success" in job.output, job.output
        until("all ranks end", lambda: not processes(tmp_path, RANK_ID="1"), BOUND_S)
    said = (tmp_path / "device0" / "train.log0").read_text()
    assert 0 < len(re.findall("loss is", said)) < EPOCHS * STEPS, said[-2000:]
    check(resnet, tmp_path)


def test_run_cluster_sh_makes_one_job(tmp_path: Path, resnet: Path) -> None:
    table = tmp_path / "rank_table_2pcs.json"
    command = ("bash", "run_cluster.sh", str(tmp_path / CIFAR), str(table), str(RANKS), "0")
    with Started(sample(tmp_path), *command, env=variables(tmp_path)) as job:
        assert job.wait() == 0
        for rank in range(RANKS):
            until("a rank ends", lambda rank=rank: not processes(tmp_path, RANK_ID=str(rank)), BOUND_S)
    check(resnet, tmp_path)


def test_mpirun_makes_one_job(tmp_path: Path, resnet: Path) -> None:
    command = ("mpirun", "--allow-run-as-root", "--oversubscribe", "-n", str(RANKS), "pytest", "-s", RESNET)
    with Started(sample(tmp_path), *command, env=variables(tmp_path)) as job:
        assert job.wait() == 0, job.output[-2000:]
    check(resnet, tmp_path)
