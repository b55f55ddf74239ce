"""The same training, gone on with by another number of ranks: every sample of the epoch counts once."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.session.resize_job import SAMPLES

pytestmark = [pytest.mark.torch, pytest.mark.processes]

JOB = str(Path(__file__).with_name("resize_job.py"))
HOLDFAST = str(Path(sys.executable).parent / "holdfast")


def test_two_ranks_then_four_then_one(tmp_path: Path) -> None:
    seen = tmp_path / "seen"

    def train(nproc: int, *arguments: str) -> str:
        done = subprocess.run(
            [HOLDFAST, "run", "--nproc-per-node", str(nproc), JOB, "--checkpoint", str(tmp_path / "ckpts"),
             "--seen", str(seen), *arguments],
            cwd=tmp_path, env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=120,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout
        return done.stdout

    train(2, "--batch", "3", "--until", "2")
    said = train(4, "--batch", "3", "--until", "3")
    assert "resumed at step 2" in said
    assert "a step of the checkpoint's job had 6 samples, one of this job has 12" in said
    assert "give the loader 0.5 times the batch size" in said
    said = train(1, "--batch", "4")
    assert "accumulate 3 batches per step" in said
    numbers = [int(line) for line in seen.read_text().split()]
    assert sorted(numbers) == list(range(SAMPLES))
