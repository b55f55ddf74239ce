"""The example of a new framework: two ranks, one is killed, and the final weights are those of an undisturbed run."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest

from holdfast.exit_codes import Exit
from tests.runtime.runs import Run, until

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "new_framework"
STEPS = 48
KILL_AT = 10
STEP_S = "0.05"

pytestmark = [pytest.mark.processes, pytest.mark.timeout(240)]


def train(where: Path, *, kill: bool) -> Run:
    """Train to the end, with the default step. With ``kill``, rank 1 is killed on the way."""
    where.mkdir()
    with Run(where, target=str(FOLDER / "train.py"), nproc=2, args=(STEP_S,)) as run:
        run.start()
        if kill:
            pid = run.pids()[1]
            run.wait_log(f"step {KILL_AT}\n", rank=1)
            os.kill(pid, signal.SIGKILL)
        assert run.wait() == Exit.OK, run.logs()
        until("nothing is left", run.nothing_left)
    return run


def weights(run: Run) -> set[str]:
    """Return the digests of the weights that the ranks printed."""
    return set(re.findall(r"^weights (\w+)$", run.logs(), re.MULTILINE))


def test_a_new_framework_loses_a_rank_and_no_bit(tmp_path: Path) -> None:
    undisturbed = train(tmp_path / "undisturbed", kill=False)
    disturbed = train(tmp_path / "disturbed", kill=True)
    assert len(weights(undisturbed)) == 1
    assert weights(disturbed) == weights(undisturbed)
    (recovered,) = disturbed.events("recovered")
    assert (recovered.data["rank"], recovered.data["steps_lost"]) == (1, 0)
    assert [e.data["action"] for e in disturbed.events("verdict")] == ["replace"]
    steps = [int(number) for number in re.findall(r"^step (\d+)$", disturbed.log(0), re.MULTILINE)]
    assert steps == list(range(1, STEPS + 1)), "the survivor commits each step once"
