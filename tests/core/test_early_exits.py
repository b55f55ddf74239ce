"""A process that ended with code 0 while others compute is the fault; the rank that misses its peer is not."""

from __future__ import annotations

from holdfast.core.protocol.messages import AgentHello, WorkerFailed
from holdfast.exit_codes import Exit
from tests.core.test_controller import NODE, Job


def misses(job: Job, rank: int, kind: str = "PeerLost") -> None:
    """Let a rank without a session raise and end because it misses a peer."""
    job.post(
        WorkerFailed(
            member_id=job.members[rank],
            generation=job.generation,
            step=0,
            kind=kind,
            what="all_gather: a peer is lost",
            traceback="",
            digest="d",
            user_error=False,
        )
    )


def started() -> Job:
    job = Job(world_size=2)
    job.post(AgentHello(node_id=NODE, slots=2, pid=1))
    job.hello()
    return job


def faults(job: Job) -> list[tuple[int, str]]:
    return [(int(str(r.data["rank"])), str(r.data["kind"])) for r in job.records if r.kind == "detected"]


def test_the_rank_that_has_left_is_named_first_and_ends_the_run_the_second_time() -> None:
    """Regression: a lost peer led to sixteen restarts, and the rank that had left was never named."""
    job = started()
    for again in (False, True):
        job.exit(1, "finished", 0, code=0, detail="left")
        assert len(faults(job)) == 2 * again, "no fault as long as no rank misses it"
        misses(job, 0)
        job.exit(0, "starting", 0, code=1, detail="starting")
        assert faults(job)[-2:] == [(1, "exit"), (0, "exception")]
        if not again:
            job.hello()
    assert job.outcome().code == Exit.FAILED
    assert job.outcome().reason == (
        "the same death at step 0 twice: rank 1 left with code 0 while others computed, after its script had ended"
    )


def test_a_rank_that_has_left_is_no_fault_of_another_exception() -> None:
    job = started()
    job.exit(1, "finished", 0, code=0, detail="left")
    misses(job, 0, "ValueError")
    assert faults(job) == [(0, "exception")]
