"""Faults during the answer to another fault, or at the end of the run.

Each of them once stopped the job or lost data.
"""

from __future__ import annotations

import msgspec

from holdfast.core.config import Config
from holdfast.core.decide.ladder import judge
from holdfast.core.decide.stop_policy import Answered
from holdfast.core.job.log_replay import ReplayedState
from holdfast.core.protocol.health_messages import CopiesDiffer, CopyDigest
from holdfast.core.protocol.messages import (
    AgentBeat,
    AgentHello,
    FaultSeen,
    Fence,
    Finished,
    KillMember,
    MemberSeen,
    Release,
    Settle,
    StartMembers,
    Tick,
    WorkerFailed,
)
from holdfast.exit_codes import Exit
from tests.core.test_controller import NODE, Job, successor
from tests.core.test_fallen import fall, live, raises, says
from tests.core.test_stop_policy import situation


def finish(job: Job, rank: int, step: int = 5) -> None:
    """Finish the session of a rank."""
    job.post(
        Finished(
            member_id=job.members[rank], generation=job.generation, step=step, reason="done", sealed=True
        )
    )


def bare() -> Job:
    """Return a job of two ranks of a script without a session."""
    job = Job(world_size=2)
    job.post(AgentHello(node_id=NODE, slots=2, pid=1))
    job.hello()
    return job


def rejoin(second: Job, living: tuple[int, ...]) -> None:
    """Connect the agent to a new controller, with the workers of these ranks."""
    seen = tuple(
        MemberSeen(
            member_id=second.members[rank], generation=second.controller.job.roster.generation, rank=rank,
            pid=100, state="ready", step=5,
        )
        for rank in living
    )  # fmt: skip
    second.post(AgentHello(node_id=NODE, slots=3, pid=1, members=seen))


def differ(job: Job, step: int = 5) -> None:
    """Report digests from all ranks. Those of rank 1 differ."""
    for rank, member in enumerate(job.members):
        copies = (CopyDigest("0,1", "w", rank),)
        generation = job.controller.job.roster.generation
        job.post(CopiesDiffer(member_id=member, generation=generation, step=step, copies=copies))
    for rank in range(len(job.members)):
        job.settle(rank, "ready", step)


def test_a_source_of_the_save_that_had_raised_and_dies_is_no_source_any_more() -> None:
    job = live(2)
    fall(job)
    (first, _) = job.sent(Settle)
    assert first.save is not None and first.save.sources == (0, 1)
    job.exit(1, "aborted")
    assert [f.member_id for f in job.sent(Fence)] == job.members[:1], "fenced again, without the dead"
    says(job, 0, "aborted", away=True)
    (order,) = job.sent(Settle)
    assert order.save is not None and order.save.sources == (0,)
    assert order.save.save_id.attempt != first.save.save_id.attempt


def test_all_raise_while_the_controller_is_replaced() -> None:
    job = bare()
    second = successor(job, world_size=2)
    rejoin(second, (0, 1))
    for member in second.members:
        second.post(
            WorkerFailed(
                member_id=member, generation=job.generation, step=0, kind="ValueError", what="bad batch",
                traceback="", digest="d", user_error=False,
            )
        )  # fmt: skip
    for rank in range(2):
        second.exit(rank, "starting", 0, code=1)
    second.post(AgentBeat(node_id=NODE))
    assert second.record("verdict")["action"] == "restart_fresh" and second.sent(StartMembers)


def test_no_rank_is_replaced_beside_a_rank_that_answers_that_it_has_finished() -> None:
    """The report of the finished rank came after its answer: the replacement waited for a rank that votes no more."""
    job = live(2)
    job.exit(1, "ready")
    job.settle(0, "finished", 5)
    assert job.record("verdict")["action"] == "restart_last_gasp"
    assert "replace: rank 0 is not inside its loop" in job.record("verdict")["refused"]


def test_who_has_ended_after_training_is_no_fault_for_a_successor() -> None:
    job = live(2)
    for rank in range(2):
        finish(job, rank)
    assert len(job.sent(Release)) == 2
    job.exit(1, "finished", code=0)
    second = successor(job, world_size=2)
    rejoin(second, (0,))
    second.exit(1, "finished", code=0)
    second.post(AgentBeat(node_id=NODE))
    assert second.sent(Fence) == [] and [r.member_id for r in second.sent(Release)] == [second.members[0]]
    second.exit(0, "finished", code=0)
    assert second.outcome().code == Exit.OK and second.outcome().reason.endswith("at step 5")


def test_a_script_without_a_session_that_is_done_in_one_rank_goes_on_in_the_others() -> None:
    job = bare()
    job.exit(1, "starting", 0, code=0)
    second = successor(job, world_size=2)
    rejoin(second, (0,))
    second.exit(1, "starting", 0, code=0)
    second.post(AgentBeat(node_id=NODE))
    assert second.record("adopted")["dead"] == [1] and not any(r.kind == "fenced" for r in second.records)
    second.exit(0, "starting", 0, code=0)
    assert second.outcome().code == Exit.OK


def test_a_second_fault_before_the_sessions_open_brings_no_distrusted_state_back() -> None:
    job = Job(2).up()
    differ(job)
    assert job.record("verdict")["action"] == "restart_fresh"
    for rank in range(2):
        job.exit(rank, "ready", code=78, kept=(5,))
    assert job.sent(StartMembers)
    job.exit(0, "starting", 0, kept=(5,))
    job.exit(1, "starting", 0, kept=(5,))
    assert job.record("verdict")["action"] == "restart_fresh", "neither from memory, nor the end"
    assert ReplayedState.read(job.records).unequal
    job.hello()
    job.open(0)
    assert not ReplayedState.read(job.records).unequal and not job.controller.job.unequal


def test_digests_of_workers_that_are_gone_accuse_nobody() -> None:
    job = Job(3).up()
    copies = (CopyDigest("0-2/1", "w", 1),)
    job.post(CopiesDiffer(member_id=job.members[0], generation=job.generation, step=5, copies=copies))
    for rank in range(3):
        job.exit(rank)
    assert job.sent(StartMembers)
    job.post(Tick(name="copies"))
    assert not any(r.kind == "corrupted" for r in job.records)


def test_ranks_that_had_all_finished_are_released_after_a_retry() -> None:
    """The last rank finishes while the fence is on its way."""
    job = live(2)
    finish(job, 0)
    job.post(FaultSeen(member_id=job.members[1], generation=job.generation, step=5, what="a vote broke"))
    job.post(Tick(name="grace"))
    finish(job, 1)
    for rank in range(2):
        job.settle(rank, "finished", 5)
    assert job.record("verdict")["action"] == "retry_in_place"
    assert [r.member_id for r in job.sent(Release)] == job.members


def test_nodes_that_stay_away_end_the_run_for_the_scheduler() -> None:
    for job, code in ((Job(2).up(3), Exit.REQUEUE), (bare(), Exit.UNSAVED)):
        job.controller.job.slots.pop(NODE)
        for rank in range(2):
            job.exit(rank)
        job.post(Tick(name="startup"))
        assert job.outcome().code == code and "nowhere to run" in job.outcome().reason


def test_a_node_that_comes_costs_nothing_of_the_budget_and_ends_nothing() -> None:
    room = situation(room="there is room for 8 ranks", causes=())
    spent = [Answered(at_s=0.0, action="replace", step=3)] * 3
    verdict = judge(1.0, room, spent, Config(run_id="run", world_size=4, max_restarts=3))
    assert verdict.rung == "grow" and not verdict.counts
    beside_a_fault = msgspec.structs.replace(room, causes=("crash",))
    assert judge(1.0, beside_a_fault, spent, Config(run_id="run", world_size=4, max_restarts=3)).stops
    assert judge(1.0, beside_a_fault, (), Config(run_id="run", world_size=4)).counts


def test_an_exception_that_was_answered_is_no_second_one_to_a_successor() -> None:
    """The agent repeats the exception. The processes stay until they are ordered to exit."""
    job = live(2)
    fall(job)
    assert job.record("verdict")["action"] == "restart_last_gasp"
    second = successor(job, world_size=2)
    rejoin(second, (0, 1))
    second.open(5, live=True)
    for rank in range(2):
        raises(second, rank)
    second.post(AgentBeat(node_id=NODE))
    for rank in range(2):
        says(second, rank, "aborted", away=True)
    assert second.record("verdict")["action"] == "restart_last_gasp"


def test_who_was_to_die_before_it_was_started_is_not_started_by_the_next_agent() -> None:
    """A rank is found dead before the new agent has listed all its processes."""
    job = Job(3)
    job.post(AgentHello(node_id=NODE, slots=3, pid=1))
    first = MemberSeen(
        member_id=job.members[0], generation=job.generation, rank=0, pid=100, state="starting", step=0
    )
    job.post(AgentHello(node_id=NODE, slots=3, pid=2, members=(first,)))
    job.exit(0, "starting", 0)
    assert len(job.sent(Fence)) == 0 and [k.member_id for k in job.sent(KillMember)] == job.members[1:]
    job.post(AgentBeat(node_id=NODE))
    (start,) = job.sent(StartMembers)
    assert start.generation == job.generation and len(start.members) == 3
