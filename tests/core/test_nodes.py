"""Nodes that are lost, with and without a majority; a controller that takes over; a minority on its own."""

from __future__ import annotations

from holdfast.core.council import StandDown
from holdfast.core.history import Past
from holdfast.core.ids import Generation, MemberId, NodeId
from holdfast.core.membership import assign
from holdfast.core.messages import (
    AgentBeat,
    AgentGone,
    AgentHello,
    Catalogued,
    Finish,
    MemberSeen,
    Settled,
    StartMembers,
    Tick,
    VotersAre,
)
from holdfast.exits import Exit
from tests.core.test_controller import Job

A, B, C = (NodeId(f"node{i}") for i in range(3))


def started() -> Job:
    """Two ranks on A and B, C waits as a spare."""
    job = Job(world_size=2, nnodes=2, voters=(A, B, C))
    for number, node in enumerate((C, A, B)):
        job.post(AgentHello(node_id=node, slots=1, pid=number, host=f"h{node}", port=7))
    return job


def lose(job: Job, *nodes: NodeId) -> None:
    """These nodes close their lines and never come back; the others go on beating."""
    for node in nodes:
        job.post(AgentGone(node_id=node))
    for _ in range(30):
        for node in {A, B, C} - set(nodes):
            job.post(AgentBeat(node_id=node), 0.0)
        job.post(Tick(name="beat"), 0.5)
        if any(isinstance(c, StandDown | Finish) for c in job.last):
            return


def test_the_voters_are_waited_for_and_ranks_go_to_the_first_nodes() -> None:
    orders = started().sent(StartMembers)
    assert [(o.node_id, [a.rank for a in o.members]) for o in orders] == [(A, [0]), (B, [1])]
    assert {(o.kv_node, o.master_host, o.master_port) for o in orders} == {(A, f"h{A}", 7)}


def test_a_node_is_lost_while_a_majority_is_heard() -> None:
    job = started()
    lose(job, B)
    assert job.record("member_lost")["rank"] == 1 and not any(isinstance(c, StandDown) for c in job.log)


def test_without_a_majority_nothing_is_decided() -> None:
    job = started()
    lose(job, B, C)
    assert any(isinstance(c, StandDown) for c in job.log)
    assert "only 1 of 3 agents are heard" in job.record("stood_down")["reason"]
    assert not any(r.kind in ("member_lost", "fenced") for r in job.records)
    assert job.post(Tick(name="beat")) == []


def test_an_electorate_of_one_decides_alone() -> None:
    job = started()
    job.post(VotersAre(voters=(A,)))
    lose(job, B, C)
    assert job.record("member_lost")["rank"] == 1 and not any(isinstance(c, StandDown) for c in job.log)


def past_of(job: Job) -> Past:
    return Past.read(job.records)


def take_over(alone: int) -> Job:
    """A controller of B's node, where rank 1 lives; A and its rank are gone."""
    before = started()
    job = Job(
        world_size=2, nnodes=2, voters=(A, B, C), term=1 if alone else 2, alone=alone, past=past_of(before)
    )
    seen = MemberSeen(MemberId(2), Generation(1, 1), 1, 102, "ready", 5)
    job.post(AgentHello(node_id=B, slots=1, pid=1, members=(seen,), host="hB", port=7))
    layouts = {"0": b"{}", "1": b"{}"}
    job.post(Catalogued(member_id=MemberId(2), generation=Generation(1, 1), version=1, layouts=layouts))
    if not alone:
        job.post(AgentHello(node_id=C, slots=1, pid=2, host="hC", port=7))
        job.post(AgentBeat(node_id=C))
    job.post(AgentBeat(node_id=B))
    job.post(Tick(name="rejoin"), 2.0)
    return job


def test_a_successor_loses_the_nodes_that_do_not_come() -> None:
    job = take_over(alone=0)
    assert job.record("node_lost")["node"] == A and job.record("adopted")["dead"] == [0]
    assert job.record("fenced")["generation"].startswith("2.")
    assert set(job.controller.job.roster.layouts) == {0, 1}, "from what the agents remember"
    assert job.controller.job.last_member >= 1_000_000, "no id is used twice"


def test_a_minority_fences_its_side_with_numbers_of_its_own_and_ends() -> None:
    job = take_over(alone=2)
    term, n = map(int, str(job.record("fenced")["generation"]).split("."))
    assert term == 1 and n > 2_000_000
    settled = Settled(member_id=MemberId(2), generation=Generation(term, n), state="aborted", step=5)
    job.post(settled)
    job.post(Tick(name="leave"), 5.0)
    assert not job.sent(StartMembers)
    for _ in range(3):
        job.post(Tick(name=f"kill:{2}"), 40.0)
    finish = next(c for c in job.log if isinstance(c, Finish))
    assert finish.code in (Exit.REQUEUE, Exit.UNSAVED) and "no majority" in finish.reason


def test_a_spare_takes_the_seats_of_a_lost_node() -> None:
    before = {0: A, 1: A, 2: B, 3: B}
    seats = assign([(B, 2), (C, 2)], 4, 10, before)
    assert {node: [(a.rank, a.local_rank) for a in here] for node, here in seats.items()} == {
        B: [(2, 0), (3, 1)],
        C: [(0, 0), (1, 1)],
    }
    assert assign([(B, 2)], 4, 10, before) == {}
