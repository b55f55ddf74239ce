"""The end of a run: a request to exit, its withdrawal, an order to stop; also after the death of the controller."""

from __future__ import annotations

from holdfast.core.ids import Generation, MemberId
from holdfast.core.protocol.messages import (
    AgentHello,
    EndRun,
    ExitAgreed,
    ExitAsked,
    ExitCancelled,
    ExitOrder,
    ExitRun,
    Finished,
    KillMember,
    Leave,
    Release,
    Send,
    SetTimer,
    Settle,
    StartMembers,
    StopRun,
    Tick,
    WorkerFailed,
    WorkerHello,
)
from holdfast.exit_codes import Exit
from tests.core.test_controller import NODE, Job, successor


def test_graceful_exit_is_told_agreed_and_coded() -> None:
    job = Job().up()
    job.post(ExitRun(grace_s=60.0, source="command line"))
    assert [o.source for o in job.sent(ExitOrder)] == ["command line"] * 3
    for member in job.members:
        job.post(ExitAgreed(member_id=member, generation=job.generation, step=9))
    job.post(ExitRun(grace_s=60.0, source="command line", cancel=True))
    assert job.record("exit_cancelled")["done"] is False
    for i, member in enumerate(job.members):
        finished = Finished(member_id=member, generation=job.generation, step=9, reason="exit", sealed=i == 2)
        job.post(finished)
    assert len(job.sent(Release)) == 3
    for rank in range(3):
        job.exit(rank, state="finished", code=75)
    assert job.outcome().code == Exit.REQUEUE
    assert job.outcome().reason == "asked to exit (command line): step 9 is saved"
    assert any(isinstance(c, Send) and isinstance(c.message, EndRun) for c in job.last)


def test_a_worker_that_asks_as_well_puts_no_deadline_off() -> None:
    """A scheduler's signal reaches the workers as well as the launcher."""
    job = Job().up()
    job.post(ExitAsked(member_id=job.members[0], generation=job.generation, source="SIGTERM"))
    assert SetTimer(name="exit", delay_s=300.0) in job.last
    job.post(ExitRun(grace_s=30.0, source="command line"))
    assert SetTimer(name="exit", delay_s=30.0) in job.last
    job.post(ExitAsked(member_id=job.members[1], generation=job.generation, source="SIGTERM"))
    assert not [c for c in job.last if isinstance(c, SetTimer)]


def test_a_cancelled_exit_goes_on() -> None:
    job = Job().up()
    job.post(ExitRun(grace_s=60.0, source="cli"))
    job.post(ExitRun(grace_s=60.0, source="cli", cancel=True))
    assert [o.cancel for o in job.sent(ExitOrder)] == [True] * 3
    assert job.record("exit_cancelled")["done"] is True


def test_agents_forget_what_was_taken_back() -> None:
    job = Job().up()
    job.post(ExitRun(grace_s=5.0, source="command line"))
    assert not job.sent(ExitCancelled)
    job.post(ExitRun(grace_s=0.0, source="command line", cancel=True))
    assert len(job.sent(ExitCancelled)) == 1
    job.post(ExitRun(grace_s=0.0, source="no request before", cancel=True))
    assert len(job.sent(ExitCancelled)) == 1


def test_the_deadline_of_an_exit_holds_under_the_next_controller() -> None:
    job = Job().up()
    job.post(ExitRun(grace_s=5.0, source="command line"))
    after = successor(job)
    assert any(isinstance(c, SetTimer) and c.name == "exit" for c in after.log)


def test_an_exit_of_which_only_the_agreement_is_heard_has_a_deadline() -> None:
    job = Job().up()
    job.post(ExitAgreed(member_id=job.members[0], generation=job.generation, step=9))
    assert any(isinstance(c, SetTimer) and c.name == "exit" for c in job.last)
    job.post(ExitAgreed(member_id=job.members[1], generation=job.generation, step=9))
    assert not any(isinstance(c, SetTimer) for c in job.last)


def test_the_deadline_of_an_exit_ends_it_unsaved() -> None:
    job = Job().up()
    job.post(ExitRun(grace_s=5.0, source="cli"))
    job.post(Tick(name="exit"), after_s=5.0)
    assert len(job.sent(KillMember)) == 3
    for rank in range(3):
        job.exit(rank)
    assert job.outcome().code == Exit.UNSAVED


def test_a_death_during_an_exit_saves_and_does_not_restart() -> None:
    job = Job().up()
    job.post(ExitRun(grace_s=60.0, source="cli"))
    job.exit(1)
    job.settle(0, "aborted", 5)
    job.settle(2, "aborted", 5)
    job.seal(job.sent(Settle)[0])
    assert {leave.code for leave in job.sent(Leave)} == {Exit.REQUEUE}
    job.exit(0, code=75)
    job.exit(2, code=75)
    assert job.outcome().code == Exit.REQUEUE


def test_stop_kills_everyone_at_once() -> None:
    job = Job().up()
    job.post(StopRun(reason="second Ctrl-C"))
    assert [k.grace_s for k in job.sent(KillMember)] == [0.0] * 3
    for rank in range(3):
        job.exit(rank)
    assert job.outcome().code == Exit.INTERRUPTED


def test_a_worker_of_another_launcher_that_comes_after_a_stop_is_sent_away() -> None:
    """It was taken for a member that no order would ever end: the run did not end."""
    job = Job(world_size=2, library=True)
    job.post(AgentHello(node_id=NODE, slots=2, pid=1))
    hellos = [
        WorkerHello(member_id=MemberId(rank + 1), generation=Generation(1, 1), rank=rank, pid=rank)
        for rank in range(2)
    ]
    job.post(hellos[0])
    job.post(StopRun(reason="second Ctrl-C"))
    job.post(hellos[1])
    assert [leave.member_id for leave in job.sent(Leave)] == [2]
    job.exit(0)
    assert job.outcome().code == Exit.INTERRUPTED


def trained(sealed: bool = True) -> Job:
    """Return a job whose ranks have all finished, while their scripts still do their later work."""
    job = Job().up()
    for member in job.members:
        job.post(Finished(member_id=member, generation=job.generation, step=9, reason="done", sealed=sealed))
    assert len(job.sent(Release)) == 3
    return job


def test_a_death_after_the_training_lets_all_ranks_repeat_what_follows() -> None:
    job = trained()
    job.exit(0, state="finished", step=9, code=0, detail="left")
    job.exit(1, state="finished", step=9, signal=9, detail="after")
    assert [order.member_id for order in job.sent(KillMember)] == [job.members[2]]
    job.exit(2, state="finished", step=9, code=0, detail="left")
    assert job.record("verdict")["action"] == "restart_checkpoint"
    (again,) = job.sent(StartMembers)
    assert [seat.rank for seat in again.members] == [0, 1, 2]
    past = successor(job).past
    assert not past.released and past.step == 9


def test_a_death_after_the_training_ends_the_run_where_nothing_can_be_repeated() -> None:
    """Either there is no final checkpoint, or the script itself had ended.

    The report names the rank that died first.
    """
    job = trained(sealed=False)
    failed = WorkerFailed(
        member_id=job.members[0], generation=job.generation, step=9, kind="PeerLost", what="all_reduce",
        traceback="", digest="d",
    )  # fmt: skip
    job.post(failed)
    job.exit(1, state="finished", step=9, signal=9, detail="after")
    for rank in (0, 2):
        job.exit(rank, state="finished", step=9, code=1, detail="after")
    assert job.outcome().reason == "rank 1 ended with signal 9 after training"
    job = trained()
    for rank in range(3):
        job.exit(rank, state="finished", step=9, signal=11 if rank == 2 else None, detail="left", code=0)
    assert job.outcome().reason == "rank 2 ended with signal 11 after training"
