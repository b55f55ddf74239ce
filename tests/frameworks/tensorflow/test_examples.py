"""The TensorFlow example runs as its first lines say."""

from __future__ import annotations

import re
from pathlib import Path

from tests.frameworks.launched import Launched

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "tensorflow_resume.py"
RUN = ("--framework", "tensorflow", "--nproc-per-node", "2")


def test_a_lost_worker_comes_back(tmp_path: Path) -> None:
    with Launched(tmp_path, *RUN, str(EXAMPLE), "--lose", "1@20") as run:
        assert run.wait() == 0, run.output
        assert "1 fault, 0 steps lost" in run.output
        steps = [int(found) for found in re.findall(r"^step (\d+) loss", run.log(0) + run.log(0, 1), re.M)]
        assert sorted(set(steps)) == list(range(1, 57))
