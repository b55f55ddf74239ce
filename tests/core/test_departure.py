"""A node that is asked to leave while others stay, and a job of several nodes that is asked as a whole."""

from __future__ import annotations

import pytest

from holdfast.core.ids import NodeId
from holdfast.core.protocol.messages import (
    AgentHello,
    CancelTimer,
    EndRun,
    ExitCancelled,
    ExitRun,
    HeldStates,
    Send,
    Tick,
)
from holdfast.exit_codes import Exit
from tests.core.test_controller import Job
from tests.core.test_nodes import A, B, C, rolled, started


def ask(job: Job, *nodes: NodeId, source: str = "SIGTERM") -> None:
    """The launchers of these nodes get a signal."""
    for node in nodes:
        job.post(ExitRun(grace_s=30.0, source=source, node_id=node))


def kinds(job: Job) -> set[str]:
    """Of all records."""
    return {record.kind for record in job.records}


def ends(job: Job) -> dict[str, EndRun]:
    """Which agents were told that it is over."""
    found = [c for c in job.log if isinstance(c, Send) and isinstance(c.message, EndRun)]
    return {c.to: c.message for c in found if isinstance(c.message, EndRun)}


@pytest.mark.parametrize(("node", "rank"), [(A, 0), (B, 1)])
def test_the_ranks_of_one_node_that_is_asked_move_to_the_spare(node: NodeId, rank: int) -> None:
    job = started()
    ask(job, node)
    assert not {"node_left", "member_lost", "exit_requested"} & kinds(job)
    job.post(Tick(name="depart"), 5.0)
    assert job.record("member_lost")["rank"] == rank and "SIGTERM" in job.record("member_lost")["what"]
    assert {to: (end.code, end.node_only) for to, end in ends(job).items()} == {
        f"agent:{node}": (Exit.REQUEUE, True)
    }
    assert "exit_requested" not in kinds(job)
    assert rolled(job)[-1] == tuple(n for n in (A, B, C) if n != node)
    job.post(AgentHello(node_id=node, slots=1, pid=9, host="h", port=7))  # started again
    assert not job.controller.job.leaving and rolled(job)[-1] == (A, B, C)


def test_a_spare_that_is_asked_leaves_and_disturbs_no_rank() -> None:
    job = started()
    ask(job, C)
    job.post(Tick(name="depart"), 5.0)
    assert set(ends(job)) == {f"agent:{C}"} and not {"member_lost", "fenced"} & kinds(job)


def test_a_job_whose_launchers_are_all_asked_leaves_as_a_whole_at_once() -> None:
    """The second request leaves too few nodes: nothing is waited for."""
    job = started()
    ask(job, A, B, C)
    assert job.record("exit_requested")["source"] == "SIGTERM"
    assert not {"node_left", "member_lost"} & kinds(job) and CancelTimer(name="depart") in job.log
    job.post(Tick(name="depart"), 5.0)
    assert "node_left" not in kinds(job)


def test_without_a_spare_the_job_leaves_as_a_whole_at_once() -> None:
    job = Job(world_size=2, nnodes=2, voters=(A, B))
    for node in (A, B):
        job.post(AgentHello(node_id=node, slots=1, pid=1, host="h", port=7))
    ask(job, B)
    assert job.record("exit_requested")["source"] == "SIGTERM"


def test_fewer_nodes_are_enough_where_they_may_be_but_not_without_a_majority() -> None:
    """With ``--shrink-to``: of three nodes one departs, of two none does."""
    for nodes, left in (((A, B, C), True), ((A, B), False)):
        job = Job(world_size=len(nodes), nnodes=len(nodes), nodes_min=1, voters=nodes)
        for node in nodes:
            job.post(AgentHello(node_id=node, slots=1, pid=1, host="h", port=7))
        ask(job, B)
        job.post(Tick(name="depart"), 5.0)
        assert ("node_left" in kinds(job)) is left and ("exit_requested" in kinds(job)) is not left


def test_a_request_of_a_node_can_be_taken_back() -> None:
    job = started()
    ask(job, B)
    job.post(ExitRun(grace_s=0.0, source="cli", cancel=True))
    assert job.sent(ExitCancelled) and not job.controller.job.leaving
    job.post(Tick(name="depart"), 5.0)
    assert not {"node_left", "exit_requested"} & kinds(job)


def test_whom_a_person_asks_is_the_whole_job() -> None:
    job = started()
    ask(job, B)
    job.post(ExitRun(grace_s=30.0, source="Ctrl-C"))
    assert job.record("exit_requested")["source"] == "Ctrl-C" and not job.controller.job.leaving


@pytest.mark.parametrize("in_memory", [False, True])
def test_a_node_that_alone_holds_shards_does_not_leave_alone(in_memory: bool) -> None:
    """The steps since the newest checkpoint were lost: its ranks went back to it, though there was time to save."""
    job = started()
    job.hello()
    job.open(20)
    job.controller.job.uncovered = lambda layouts, sources: "" if 1 in sources else "shard 1 is gone"
    if in_memory:
        job.post(HeldStates(node_id=C, ranks={"1": (20,)}))
    ask(job, B)
    job.post(Tick(name="depart"), 5.0)
    assert ("node_left" in kinds(job)) is in_memory and ("exit_requested" in kinds(job)) is not in_memory
