"""States whose transfer takes longer than any constant time limit: no process with progress is killed."""

from __future__ import annotations

import random

import pytest

from holdfast.core.job.wait_bounds import Bounds
from holdfast.exit_codes import Exit
from holdfast.sim.faults import SimFault, random_faults
from holdfast.sim.invariants import Violation
from holdfast.sim.sim_result import SimResult
from holdfast.sim.world import run_sim
from tests.sim.sizes import world_of

KILL = (SimFault(kind="kill", at_s=0.95, rank=1, state="compute"),)
SLOW = {"gasp": 70.0, "join": 130.0, "vouch": 20.0}


def outcome(result: SimResult) -> tuple[list[object], int, bool]:
    """Return the verdicts, the number of members killed for a time-out, and whether steps were lost."""
    told = result.records
    return (
        [r.data["action"] for r in told if r.kind == "verdict"],
        sum(r.kind == "detected" and r.data["kind"] == "silent" for r in told),
        any(r.data["steps_lost"] for r in told if r.kind == "restored"),
    )


@pytest.mark.parametrize(
    ("seed", "seconds", "action"),
    [
        (7, {"gasp": 70.0}, "restart_last_gasp"),
        (2, {"join": 130.0}, "replace"),
        (2, {"join": 400.0}, "replace"),
        (2, {"vouch": 90.0}, "replace"),
        (7, {"vouch": 90.0, "gasp": 300.0}, "restart_last_gasp"),
    ],
)
def test_one_kill_costs_no_step_however_long_the_state_takes(
    seed: int, seconds: dict[str, float], action: str
) -> None:
    """Regression: three healthy workers were killed, and three steps lost, because a save took 70 s."""
    result = run_sim(4, seed, KILL, world=world_of(seconds))
    assert (result.code, result.step) == (Exit.OK, 12)
    assert outcome(result) == ([action], 0, False)


def test_one_that_makes_no_progress_is_killed_all_the_same() -> None:
    result = run_sim(4, 7, KILL, world=world_of({"gasp": 70.0}, silent=True))
    assert (result.code, result.step) == (Exit.OK, 12)
    assert outcome(result)[1] > 0


def test_a_controller_that_ignores_progress_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Bounds, "moved", lambda self, member_id: None)
    with pytest.raises(Violation, match="progress_is_waited_for"):
        run_sim(4, 7, KILL, world=world_of({"gasp": 70.0}))


def test_random_faults_in_a_job_of_large_states() -> None:
    for seed in range(60):
        rng = random.Random(seed)
        faults = random_faults(rng, 4, 2.0, rng.randint(1, 3))
        result = run_sim(4, seed, faults, world=world_of(SLOW))
        assert (result.code, result.step) == (Exit.OK, 12) or result.code == Exit.FAILED, f"seed {seed}"
