"""A rank that computes wrong gradients is named by ranks that compute the same gradients again."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import holdfast
from holdfast.errors import UsageError
from holdfast.exit_codes import Exit
from tests.session.launch import run_job

pytestmark = pytest.mark.torch

JOB = str(Path(__file__).with_name("recompute_job.py"))


def ends(where: Path, ranks: int, way: str, every: int) -> tuple[set[str], str]:
    """Run the job. Return the final values of the ranks, and the output."""
    where.mkdir()
    done = run_job(where, ranks, JOB, way, str(every))
    assert done.returncode == Exit.OK, done.stdout
    told = [path.read_text() for path in where.glob("ended-*")]
    assert len(told) == ranks, done.stdout
    return set(told), done.stdout


@pytest.mark.processes
def test_a_device_that_computes_wrong_numbers_is_replaced_before_the_update(tmp_path: Path) -> None:
    calm, _ = ends(tmp_path / "calm", 3, "calm", 0)
    mended, output = ends(tmp_path / "mended", 3, "always", 1)
    assert "rank 1: ComputeError: step 4: two other ranks agree" in output and mended == calm, output


@pytest.mark.more
@pytest.mark.processes
def test_a_wrong_gradient_is_in_all_copies_and_a_check_changes_nothing(tmp_path: Path) -> None:
    calm, _ = ends(tmp_path / "calm", 3, "calm", 0)
    checked, output = ends(tmp_path / "checked", 3, "calm", 1)
    assert checked == calm and "verify_ranks" not in output and "fault" not in output, output
    unseen, _ = ends(tmp_path / "unseen", 3, "always", 0)
    assert len(unseen) == 1 and unseen != calm


@pytest.mark.more
@pytest.mark.processes
def test_one_wrong_number_in_a_run_for_the_check_names_one_of_two_ranks(tmp_path: Path) -> None:
    calm, _ = ends(tmp_path / "calm", 2, "calm", 0)
    mended, output = ends(tmp_path / "once", 2, "once", 1)
    assert "rank 1: ComputeError: step 4" in output and mended == calm, output


@pytest.mark.processes
def test_two_ranks_that_differ_for_good_end_the_run(tmp_path: Path) -> None:
    done = run_job(tmp_path, 2, JOB, "always", "2")
    assert done.returncode == Exit.BAD_INPUT, done.stdout
    assert "step 5: ranks compute different gradients from the batches of rank" in done.stdout, done.stdout
    assert "they all did at step 3: what was saved since may be wrong" in done.stdout, done.stdout


@pytest.mark.more
@pytest.mark.processes
def test_a_block_that_depends_on_its_rank_is_said_to_be_unchecked(tmp_path: Path) -> None:
    """A different result is no fault of the device here. The job continues with the same bits as without the check."""
    plain, _ = ends(tmp_path / "plain", 2, "ranked", 0)
    told, output = ends(tmp_path / "ranked", 2, "ranked", 2)
    assert told == plain and output.count("verify_ranks checks nothing") == 1, output
    assert "the block depends on the rank that runs it" in output, output


def test_a_count_below_zero_is_refused() -> None:
    net = nn.Linear(2, 1)
    with pytest.raises(UsageError, match="verify_ranks"):
        holdfast.session(model=net, optimizer=torch.optim.SGD(net.parameters(), 0.1), verify_ranks=-1)
