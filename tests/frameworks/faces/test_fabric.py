"""A Lightning Fabric loop needs only the plain session, which takes what ``fabric.setup`` returned."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.exit_codes import Exit
from tests.frameworks.faces.running import BOUND_S, run

JOB = Path(__file__).with_name("fabric_job.py")
LAUNCH = ["holdfast", "run"]


def told(where: Path, *arguments: str) -> list[str]:
    """Run a job of two ranks, and return what its ranks say of their end."""
    code, output = run(where, LAUNCH, JOB, *arguments, ranks=2)
    assert code == 0, output
    logs = sorted(where.glob("runs/*/attempt-*/rank-*.log"))
    return sorted(line for log in logs for line in log.read_text().splitlines() if line.startswith("rank "))


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Return the end of the undisturbed job."""
    return told(tmp_path_factory.mktemp("calm"), "epochs")


def test_kills_in_a_step_and_in_an_evaluation_leave_the_same_weights(tmp_path: Path, calm: list[str]) -> None:
    """Regression: names in a checkpoint had the prefix of Fabric's wrapper, so it did not load into the model."""
    assert len({line.split()[-1] for line in calm}) == 1 and len(calm) == 3, calm
    assert told(tmp_path, "epochs", "1:3:backward", "0:0:evaluation") == calm


def test_kills_with_a_marked_forward_method(tmp_path: Path, calm: list[str]) -> None:
    assert told(tmp_path, "marked", "0:2:update", "1:7:log") == calm


@pytest.mark.parametrize("way", ["weighted", "scaler", "sharded"])
def test_a_kill_leaves_the_same_weights(tmp_path: Path, way: str) -> None:
    assert told(tmp_path / "killed", way, "1:8:forward") == told(tmp_path / "calm", way)


@pytest.mark.parametrize(
    ("way", "error"),
    [
        ("left", "step 0 leaves the gradients of its update"),
        ("scaler-forgotten", "scaler=fabric.strategy.precision.scaler"),
    ],
)
def test_what_would_be_wrong_after_a_fault_is_refused(tmp_path: Path, way: str, error: str) -> None:
    """Regression: gradients left behind a marked method were not found. The scaler failed without a word of it."""
    code, output = run(tmp_path, LAUNCH, JOB, way, ranks=2)
    assert code == Exit.BAD_INPUT and error in output, output


def test_ranks_that_the_script_starts_itself_are_refused(tmp_path: Path) -> None:
    """Regression: rank 0 had torch's own groups, the other rank Holdfast's, and both waited for each other."""
    done = subprocess.run(
        [sys.executable, str(JOB), "epochs"], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, timeout=BOUND_S,
    )  # fmt: skip
    assert done.returncode != 0 and "was started by the script itself, not by a launcher" in done.stdout
    assert "holdfast run --nproc-per-node 2 fabric_job.py" in done.stdout
