"""A training that another number of ranks continues: every sample of the epoch counts once."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.exit_codes import Exit
from tests.session.launch import run_job
from tests.session.resize_job import SAMPLES

pytestmark = [pytest.mark.torch, pytest.mark.processes]

JOB = str(Path(__file__).with_name("resize_job.py"))


def train(where: Path, nproc: int, *arguments: str) -> tuple[int, str]:
    """Run the job. Return exit code and output. A file lists the samples that counted."""
    places = ["--checkpoint", str(where / "ckpts"), "--seen", str(where / "seen")]
    done = run_job(where, nproc, JOB, *places, *arguments)
    return done.returncode, done.stdout


def test_two_ranks_then_four_then_one(tmp_path: Path) -> None:
    code, said = train(tmp_path, 2, "--batch", "3", "--until", "2")
    assert code == 0, said
    code, said = train(tmp_path, 4, "--batch", "3", "--until", "3")
    assert code == 0 and "resumed at step 2" in said, said
    assert "a step of the checkpoint's job had 6 samples, one of this job has 12" in said
    assert "give the loader 0.5 times the batch size" in said
    code, said = train(tmp_path, 1, "--batch", "4", "--shift", "100")
    assert code == 0 and "accumulate 3 batches per step" in said, said
    assert "as many samples (48), but other ones" in said  # the numbers start at 100 and not at 0
    numbers = [int(line) % 100 for line in (tmp_path / "seen").read_text().split()]
    assert sorted(numbers) == list(range(SAMPLES))


def test_ranks_with_different_data_are_told(tmp_path: Path) -> None:
    code, said = train(tmp_path, 2, "--batch", "3", "--fewer", "1")
    assert code == Exit.BAD_INPUT, said
    assert "draw from different datasets: here are" in said and "the same files on every node" in said
    assert not (tmp_path / "seen").exists()
