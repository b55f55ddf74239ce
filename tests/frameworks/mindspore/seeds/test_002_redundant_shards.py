"""Seed 002: the file of rank 0 is lost; `group_info.pb` and the strategy file name a rank with the same slices."""

from __future__ import annotations

import shutil
from pathlib import Path

import mindspore as ms
import pytest

import holdfast.mindspore
from tests.frameworks.mindspore.seeds.data import write_mnist
from tests.frameworks.mindspore.seeds.samples import copied, same
from tests.frameworks.started import BOUND_S, Started

IMAGES = 512
LAST = f"test-2_{IMAGES // 32 // 2}.ckpt"
pytestmark = pytest.mark.timeout(4 * BOUND_S)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run the document's first script. Return the folder with its files."""
    folder = copied("002_redundant_shards", tmp_path_factory.mktemp("saved"))
    write_mnist(folder / "MNIST_Data", IMAGES)
    start(folder, "run_parallel_save_ckpt.sh")
    return folder


def start(folder: Path, script: str, *arguments: str) -> None:
    """Run a start script of the document to its end."""
    with Started(folder, "bash", script, str(folder / "MNIST_Data" / "train"), *arguments) as job:
        assert job.wait() == 0, job.output


def recovered(saved: Path, folder: Path, file: Path) -> Path:
    """Copy the saved files, and train on from ``file`` with the document's second script."""
    shutil.copytree(saved, folder, dirs_exist_ok=True)
    start(folder, "run_parallel_recover_ckpt.sh", str(file))
    return folder


def test_a_lost_file_is_replaced_by_that_of_another_rank(saved: Path, tmp_path: Path) -> None:
    own = saved / "ckpt_dir0" / LAST
    undisturbed = recovered(saved, tmp_path / "undisturbed", own)
    holdfast.mindspore.export_checkpoint(saved / "checkpoints", tmp_path / "out")
    rank_list = ms.restore_group_info_list(str(tmp_path / "out" / "rank_0" / "group_info.pb"))
    assert sorted(rank_list) == [0, 1]
    lost = tmp_path / "lost"
    shutil.copytree(saved, lost)
    (lost / "ckpt_dir0" / LAST).unlink()
    (holder,) = (rank for rank in rank_list if rank != 0)
    shutil.copy(lost / f"ckpt_dir{holder}" / LAST, lost / "ckpt_dir0" / LAST)
    disturbed = recovered(lost, tmp_path / "disturbed", lost / "ckpt_dir0" / LAST)
    for rank in (0, 1):
        assert same(undisturbed / f"final-{rank}.ckpt", disturbed / f"final-{rank}.ckpt")


def test_the_strategy_file_names_the_holder(saved: Path, tmp_path: Path) -> None:
    files = holdfast.mindspore.export_checkpoint(saved / "checkpoints", tmp_path)
    assert same(files[0], files[1])
    files[0].unlink()
    strategy = str(tmp_path / "strategy" / "src_strategy_0.ckpt")
    assert ms.get_ckpt_path_with_strategy(str(files[0]), strategy) == str(files[1])
