"""The proof that ranks have different numbers of batches, and the report of a rank that waits at its loop's end."""

from __future__ import annotations

import pytest

from holdfast.core.config import Config
from holdfast.core.decide.ladder import judge
from holdfast.core.decide.stop_policy import Situation
from holdfast.core.decide.unequal_batches import RankPlace, unequal
from holdfast.core.ids import Generation
from holdfast.core.protocol.messages import (
    FaultSeen,
    Leave,
    LoopEnded,
    LoopEndSeen,
    LoopPlace,
    RankState,
    Settle,
    Settled,
    Tick,
)
from holdfast.exit_codes import Exit
from tests.core.test_controller import Job
from tests.core.test_fallen import live

NOW = Generation(1, 4)


def ended(rank: int, loop: int = 2, step: int = 9) -> RankPlace:
    """Return the place of a rank at the end of its loop, before ``step``."""
    return RankPlace(rank, "ready", step, LoopPlace(loop, step, 4))


def inside(rank: int, state: RankState = "aborted", loop: int = 2, step: int = 9) -> RankPlace:
    """Return the place of a rank that has not ended its loop."""
    return RankPlace(rank, state, step, LoopPlace(loop))


def test_both_ranks_and_the_steps_are_named_and_the_run_ends() -> None:
    failure = unequal(NOW, [inside(0, "ready", step=8), inside(1), ended(2), inside(3), ended(4)])
    assert failure is not None and failure.user_error
    assert (failure.rank, failure.step, failure.occurrence) == (2, 9, NOW.pack())
    assert failure.what.startswith(
        "rank 2 has no batch for step 9, after 4 steps of this loop, and rank 1 has one"
    )
    assert "\n  next: give every rank the same number of batches" in failure.what
    situation = Situation(
        step=9, base_step=0, session=True, all_alive=True, all_sound=True, unreplaceable="", uncovered="",
        checkpoint_known=False, failures=(failure,),
    )  # fmt: skip
    verdict = judge(1.0, situation, [], Config(run_id="r", world_size=5))
    assert (verdict.action, verdict.save) == ("stop_bad_input", True)
    assert verdict.reason.startswith("UnequalBatchesError: rank 2 has no batch")


@pytest.mark.parametrize(
    "ranks",
    [
        [ended(0), ended(1)],
        [ended(0), inside(1, "ready")],  # it may be about to end its loop
        [ended(0), inside(1, loop=3)],  # it has begun the next loop
        [ended(0), inside(1, step=8)],
        [ended(0), RankPlace(1, "aborted", 9, None)],
        [inside(0), inside(1)],
        [],
    ],
)
def test_no_proof(ranks: list[RankPlace]) -> None:
    assert unequal(NOW, ranks) is None


def waits(job: Job, rank: int, generation: Generation | None = None) -> None:
    """Report that a rank waits at the end of loop 0, before step 5."""
    generation = generation or job.controller.job.roster.generation
    job.post(LoopEnded(member_id=job.members[rank], generation=generation, loop=0, step=5))


def test_all_ranks_get_the_report_of_the_first_rank_that_waits() -> None:
    job = live()
    waits(job, 1, Generation(1, 0))
    assert not job.sent(LoopEndSeen), "of an earlier generation"
    waits(job, 1)
    assert [(seen.member_id, seen.rank, seen.loop, seen.step) for seen in job.sent(LoopEndSeen)] == [
        (member_id, 1, 0, 5) for member_id in job.members
    ]
    waits(job, 2)
    assert not job.sent(LoopEndSeen), "the report of a second rank shows nothing more"
    waits(job, 1)
    assert len(job.sent(LoopEndSeen)) == 3, "the first report may have been lost with an agent"


def test_the_answers_to_the_fence_end_the_run_after_a_save() -> None:
    job = live()
    job.post(
        FaultSeen(member_id=job.members[0], generation=job.generation, step=5, what="rank 1 has no batch")
    )
    job.post(Tick(name="grace"))
    places = {0: LoopPlace(0), 1: LoopPlace(0, 5, 5), 2: LoopPlace(0)}
    for rank, state in enumerate[RankState](["aborted", "ready", "aborted"]):
        job.post(
            Settled(
                member_id=job.members[rank], generation=job.generation, state=state, step=5, loop=places[rank]
            )
        )
    verdict = job.record("verdict")
    assert verdict["action"] == "stop_bad_input", verdict
    job.seal(job.sent(Settle)[0])
    assert {leave.code for leave in job.sent(Leave)} == {Exit.BAD_INPUT}
