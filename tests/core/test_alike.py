"""A death that repeats at the same place has one cause, and ends the run independently of the fault budget."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast.core.protocol.messages import AgentHello, StartMembers
from holdfast.exit_codes import Exit
from tests.core.test_controller import NODE, Job


def dies(job: Job, times: int, **how: Any) -> None:
    """Let rank 1 die in the block of step 5, ``times`` times. The other ranks exit for a restart."""
    for _ in range(times):
        job.exit(1, **how)
        for rank in (0, 2):
            if not job.controller.job.ended:
                job.exit(rank, code=int(Exit.RESTART))
        if not job.controller.job.ended:
            job.hello()
            job.open(0)


@pytest.mark.parametrize(
    ("how", "times", "told"),
    [
        ({"signal": 11}, 2, "twice: rank 1 was killed by signal 11, in backward"),
        ({"code": 0}, 2, "twice: rank 1 ended with code 0, in backward"),
        ({"code": 7}, 2, "twice: rank 1 ended with code 7, in backward"),
        ({"signal": 9, "oom_kills": 1}, 2,
         "twice: rank 1 was killed by signal 9, out of memory: oom_kill of its cgroup rose by 1, in backward"),
        ({"signal": 9}, 4, "4 times: rank 1 was killed by signal 9, in backward"),
    ],
)  # fmt: skip
def test_a_death_that_comes_again_ends_the_run(how: dict[str, Any], times: int, told: str) -> None:
    job = Job().up()
    dies(job, times - 1, **how)
    assert not job.controller.job.ended
    dies(job, 1, **how)
    assert job.outcome().code == Exit.FAILED
    assert job.outcome().reason == f"the same death at step 5 {told}"


def test_deaths_at_other_places_or_of_other_ranks_are_not_alike() -> None:
    job = Job().up()
    dies(job, 1, signal=11)
    dies(job, 1, signal=11, detail="forward")
    dies(job, 1, signal=6)
    dies(job, 1, signal=11, step=6)
    assert not job.controller.job.ended


def test_a_start_that_fails_in_the_same_way_ends_the_run_and_an_old_script_without_a_session_does_not() -> (
    None
):
    for age_s, code in ((1.0, Exit.FAILED), (100.0, None)):
        job = Job()
        job.post(AgentHello(node_id=NODE, slots=3, pid=1))
        for _ in range(2):
            job.hello()
            job.now += age_s
            job.exit(1, "starting", 0, signal=6, detail="starting")
            for rank in (0, 2):
                if not job.controller.job.ended:
                    job.exit(rank, "starting", 0, code=int(Exit.RESTART), detail="starting")
        assert job.controller.job.ended == (code is not None)
        assert code is None or job.outcome().code == code
        assert len([c for c in job.log if isinstance(getattr(c, "message", None), StartMembers)]) == 2 + (
            not code
        )
