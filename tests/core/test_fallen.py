"""Ranks that user code has left: they keep their state until other ranks hold it, and never continue in place."""

from __future__ import annotations

from holdfast.core.ids import Generation, SaveId
from holdfast.core.protocol.layout_messages import Layouts
from holdfast.core.protocol.messages import (
    AgentHello,
    ExitAgreed,
    FaultSeen,
    Fence,
    Joined,
    KillMember,
    Leave,
    RankState,
    Release,
    ResumeInPlace,
    SaveReported,
    Settle,
    Settled,
    StartMembers,
    StateOffered,
    Tick,
    WorkerFailed,
    WorkerHello,
)
from holdfast.exit_codes import Exit
from tests.core.test_controller import NODE, Job


def live(world_size: int = 3) -> Job:
    """Return a job whose lost ranks can be replaced."""
    job = Job(world_size).up()
    for member in job.controller.job.roster.members:
        member.live = True
    return job


def raises(job: Job, rank: int, step: int = 5, *, user_error: bool = False) -> None:
    """Let user code of a rank raise. Its session keeps the process."""
    job.post(
        WorkerFailed(
            member_id=job.members[rank],
            generation=job.controller.job.roster.generation,
            step=step,
            kind="ValueError",
            what="nan",
            traceback="",
            digest="d",
            user_error=user_error,
            stays=True,
        )
    )


def says(job: Job, rank: int, state: RankState, step: int = 5, **more: object) -> None:
    """Answer the fence for a rank."""
    settled = Settled(member_id=job.members[rank], generation=job.generation, state=state, step=step, **more)  # type: ignore[arg-type]
    job.post(settled)


def test_when_all_raise_at_once_they_are_the_sources_of_a_checkpoint_and_start_again() -> None:
    job = live()
    for rank in range(3):
        raises(job, rank)
    assert len([c for c in job.log if isinstance(c, KillMember)]) == 0
    for rank in range(3):
        says(job, rank, "aborted", away=True)
    assert job.record("verdict")["action"] == "restart_last_gasp"
    orders = job.sent(Settle)
    assert orders[0].save is not None and orders[0].save.sources == (0, 1, 2)
    job.seal(orders[0])
    assert {leave.code for leave in job.sent(Leave)} == {Exit.RESTART}


def test_one_that_raises_is_let_go_as_soon_as_the_others_have_answered() -> None:
    job = live()
    raises(job, 1)
    assert {f.member_id for f in job.sent(Fence)} == set(job.members), "it answers as well"
    says(job, 1, "aborted", away=True)
    says(job, 0, "aborted")
    assert job.sent(Release) == []
    says(job, 2, "aborted")
    assert [r.member_id for r in job.sent(Release)] == [job.members[1]]
    job.exit(1, "aborted", code=1)
    assert job.record("verdict")["action"] == "replace" and job.sent(StartMembers)


def fall(job: Job, *, user_error: bool = False) -> None:
    """Let user code raise in all ranks at once."""
    for rank in range(len(job.members)):
        raises(job, rank, user_error=user_error)
    for rank in range(len(job.members)):
        says(job, rank, "aborted", away=True)


def test_the_same_exception_of_all_again_ends_the_run() -> None:
    job = live(2)
    fall(job)
    (order, _) = job.sent(Settle)
    job.seal(order)
    for rank in range(2):
        job.exit(rank, "aborted", code=78)
    job.hello()
    job.open(5)
    fall(job)
    assert job.record("verdict")["action"] == "stop_user_bug"
    assert job.sent(Settle) == [], "what they hold was saved before"
    for rank in range(2):
        job.exit(rank, "aborted", code=1)
    assert job.outcome().code == Exit.FAILED and "twice" in job.outcome().reason


def test_an_end_whose_save_fails_stays_an_end() -> None:
    job = live(2)
    fall(job, user_error=True)
    assert job.record("verdict")["action"] == "stop_bad_input"
    (order, _) = job.sent(Settle)
    job.save_fails(order)
    says(job, 0, "aborted", away=True)
    says(job, 1, "aborted", away=True)
    assert job.record("verdict")["action"] == "stop_bad_input"


def test_a_death_without_a_report_does_not_hide_the_error_that_the_user_has_to_fix() -> None:
    """Regression: the run was started again, and each start raised the same error."""
    job = live(2)
    raises(job, 1, user_error=True)
    job.exit(1, "aborted", code=int(Exit.BAD_INPUT))
    job.exit(0, "aborted", code=int(Exit.BAD_INPUT))
    assert job.record("verdict")["action"] == "stop_bad_input"


def test_connections_that_broke_between_two_steps_are_no_reason_to_go_on_in_place() -> None:
    job = live()
    job.post(FaultSeen(member_id=job.members[0], generation=job.generation, step=5, what="reset"))
    job.post(Tick(name="grace"), after_s=0.3)
    for rank in range(3):
        says(job, rank, "ready", away=True)
    assert job.record("verdict")["action"] == "restart_last_gasp", "no rank is inside the loop any more"


def _replaced(job: Job, lost: int = 1) -> None:
    """Lose a rank and let its newcomer join, so that all ranks get the order to continue."""
    job.exit(lost, "compute")
    for rank in {0, 1, 2} - {lost}:
        says(job, rank, "ready")
    for rank in {0, 1, 2} - {lost}:
        job.post(
            StateOffered(member_id=job.members[rank], generation=job.generation, step=5, host="h", port=1)
        )
    job.post(WorkerHello(member_id=job.members[lost], generation=job.generation, rank=lost, pid=9))
    job.post(Joined(member_id=job.members[lost], generation=job.generation, step=5))


def test_a_rank_that_falls_after_it_has_answered_says_so_and_all_start_again() -> None:
    job = live()
    _replaced(job)
    assert len(job.sent(ResumeInPlace)) == 3
    says(job, 0, "ready", away=True)  # the rank's metric met the fault only now
    assert "left its loop" in str(job.record("fenced")["reason"])
    for rank in range(3):
        says(job, rank, "ready", away=rank == 0)
    assert job.record("verdict")["action"] == "restart_last_gasp"


def test_one_that_is_stuck_in_the_decided_update_does_not_take_the_others_with_it() -> None:
    job = live()
    job.post(FaultSeen(member_id=job.members[0], generation=job.generation, step=5, what="reset"))
    job.post(Tick(name="grace"), after_s=0.3)
    says(job, 0, "in_doubt")
    says(job, 1, "ready", 6)
    says(job, 2, "in_doubt")
    assert job.record("verdict")["action"] == "retry_in_place"
    says(job, 0, "ready", 6)
    job.post(Tick(name="retry"), after_s=60)
    assert [k.member_id for k in job.sent(KillMember)] == [job.members[2]]


def test_a_death_after_the_last_save_of_an_exit_ends_the_run() -> None:
    job = live()
    job.post(ExitAgreed(member_id=job.members[0], generation=job.generation, step=5))
    job.controller.job.sealed_step = 5
    job.exit(1, "ready")
    says(job, 0, "ready")
    says(job, 2, "ready")
    assert {leave.code for leave in job.sent(Leave)} == {Exit.REQUEUE}
    assert not job.sent(StartMembers), "a newcomer would train alone"


def gone_back() -> Job:
    """Lose rank 1 at step 105. All ranks get the order to continue at step 100, which each has in memory."""
    job = live()

    def whole(layouts: Layouts, sources: tuple[int, ...]) -> str:
        return "" if len(sources) == 3 else "a box is gone"

    job.controller.job.uncovered = whole
    job.exit(1, "compute", 105, signal=9, kept=(100,))
    for rank in (0, 2):
        says(job, rank, "aborted", 105, kept=(100,), rewind=0)
    assert job.record("verdict")["action"] == "replace_from_memory"
    for rank in (0, 2):
        job.post(
            StateOffered(member_id=job.members[rank], generation=job.generation, step=100, host="h", port=1)
        )
    job.post(WorkerHello(member_id=job.members[1], generation=job.generation, rank=1, pid=9))
    newcomer = job.controller.job.roster.members[1]
    newcomer.live, newcomer.opened_step = True, 100
    job.post(Joined(member_id=job.members[1], generation=job.generation, step=100))
    assert {order.step for order in job.sent(ResumeInPlace)} == {100}
    return job


def test_after_all_went_back_the_page_of_the_lost_rank_proves_no_later_step() -> None:
    job = gone_back()
    job.exit(2, "compute", 100, signal=9, kept=(100,))
    for rank in (0, 1):
        says(job, rank, "aborted", 100, kept=(100,), rewind=0)
    assert job.record("planned")["step"] == 100
    assert job.record("verdict")["action"] == "replace_from_memory"


def test_what_is_sealed_late_for_what_was_given_up_carries_nobody_forward() -> None:
    """Regression: a save of the abandoned future was sealed after all ranks had gone back.

    Ranks in doubt took it as proof that the vote of this step had passed. They would have applied gradients without a
    part of one rank.
    """
    job = gone_back()
    late = SaveId(run="run", generation=Generation(1, 1), step=101, attempt=0, kind="periodic")
    job.post(
        SaveReported(
            member_id=job.members[0], generation=late.generation, save_id=late, sealed=True, size_bytes=1,
            duration_s=9.0,
        )
    )  # fmt: skip
    assert job.controller.job.sealed_step == 101
    job.exit(2, "compute", 100)
    says(job, 0, "in_doubt", 100)
    says(job, 1, "in_doubt", 100)
    assert (job.record("planned")["step"], job.record("planned")["decision"]) == (100, "back")


def test_who_leaves_for_the_fence_is_no_reason_to_try_what_cannot_work_once_more() -> None:
    """All ranks find the same mistake in their input.

    The fence for the first error overtakes the reports of the others.
    """
    job = Job()
    job.post(AgentHello(node_id=NODE, slots=3, pid=1))
    job.hello()
    job.post(
        WorkerFailed(
            member_id=job.members[0], generation=job.generation, step=0, kind="CheckpointMismatch", what="w",
            traceback="", digest="d", user_error=True,
        )
    )  # fmt: skip
    for rank, code in ((1, Exit.RESTART), (0, Exit.BAD_INPUT), (2, Exit.RESTART)):
        job.exit(rank, "starting", 0, code=int(code))
    assert job.record("verdict")["action"] == "stop_bad_input"
    assert job.outcome().code == Exit.BAD_INPUT
