"""A protected ``fit`` looks like one fit to Keras' callbacks and optimizer, although it runs one fit per epoch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.frameworks.launched import BOUND_S

JOB = str(Path(__file__).with_name("fit_job.py"))

pytestmark = pytest.mark.timeout(3 * BOUND_S)


def seen(where: Path, legacy: str, *arguments: str) -> dict[str, Any]:
    """Run the job, and return its JSON line."""
    where.mkdir()
    env = {**os.environ, "OMP_NUM_THREADS": "1", "TF_USE_LEGACY_KERAS": legacy}
    done = subprocess.run(
        [sys.executable, JOB, *arguments],
        cwd=where,
        env=env,
        capture_output=True,
        text=True,
        timeout=BOUND_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("legacy", ["0", "1"])
def test_an_early_stop_a_log_and_an_average_go_over_all_epochs(tmp_path: Path, legacy: str) -> None:
    plain = seen(tmp_path / "plain", legacy, "--plain")
    assert plain["hooks"][0] == "begin" and 2 < len(plain["hooks"]) < 8 and plain["hooks"][-1] == "end"
    assert seen(tmp_path / "protected", legacy) == plain
