"""Nodes that are lost, with and without a majority; a controller that takes over; a minority on its own."""

from __future__ import annotations

import pytest

from holdfast.core.ids import NO_VERSION, Generation, LayoutVersion, MemberId, NodeId
from holdfast.core.job.log_replay import ReplayedState
from holdfast.core.job.membership import assign
from holdfast.core.protocol.layout_messages import Layout, Layouts
from holdfast.core.protocol.messages import (
    AgentBeat,
    AgentGone,
    AgentHello,
    Catalogued,
    EndRun,
    ExitAgreed,
    ExitOrder,
    ExitRun,
    Finish,
    KillMember,
    LayoutPublished,
    MemberExited,
    MemberSeen,
    Rolled,
    SaveReported,
    Send,
    SessionOpened,
    SetTimer,
    Settle,
    Settled,
    StartMembers,
    StepReached,
    Tick,
    VotersAre,
)
from holdfast.core.protocol.peer_messages import StepDown
from holdfast.exit_codes import Exit
from tests.core.test_controller import Job

A, B, C = (NodeId(f"node{i}") for i in range(3))


def started() -> Job:
    """Return a job with two ranks on A and B; C waits as a spare."""
    job = Job(world_size=2, nnodes=2, voters=(A, B, C))
    for number, node in enumerate((C, A, B)):
        job.post(AgentHello(node_id=node, slots=1, pid=number, host=f"h{node}", port=7))
    return job


def lose(job: Job, *nodes: NodeId) -> None:
    """Close the connections of these nodes for good. The other nodes still send heartbeats."""
    for node in nodes:
        job.post(AgentGone(node_id=node))
    for _ in range(30):
        for node in {A, B, C} - set(nodes):
            job.post(AgentBeat(node_id=node), 0.0)
        job.post(Tick(name="beat"), 0.5)
        if any(isinstance(c, StepDown | Finish) for c in job.last):
            return


def test_the_voters_are_waited_for_and_ranks_go_to_the_first_nodes() -> None:
    orders = started().sent(StartMembers)
    assert [(o.node_id, [a.rank for a in o.members]) for o in orders] == [(A, [0]), (B, [1])]
    assert {(o.kv_node, o.master_host, o.master_port) for o in orders} == {(A, f"h{A}", 7)}


def test_a_request_to_leave_waits_for_the_nodes_that_are_about_to_come() -> None:
    job = Job(world_size=2, nnodes=2, voters=(A, B, C))
    job.post(AgentHello(node_id=B, slots=1, pid=1, host="hB", port=7))
    job.post(ExitRun(grace_s=30.0, source="SIGTERM"))
    assert not any(isinstance(c, Finish) for c in job.log)
    for node in (A, C):
        job.post(AgentHello(node_id=node, slots=1, pid=1, host="h", port=7))
    assert {c.to for c in job.last if isinstance(c, Send) and isinstance(c.message, EndRun)} == {
        f"agent:{node}" for node in (A, B, C)
    }
    assert not job.sent(StartMembers)


def test_a_request_to_leave_waits_for_nobody_for_long() -> None:
    job = Job(world_size=2, nnodes=2, voters=(A, B, C))
    job.post(AgentHello(node_id=B, slots=1, pid=1, host="hB", port=7))
    job.post(ExitRun(grace_s=30.0, source="SIGTERM"))
    job.post(Tick(name="together"), 2.0)
    assert [c.code for c in job.last if isinstance(c, Finish)] == [Exit.UNSAVED]


def test_a_node_is_lost_while_a_majority_is_heard() -> None:
    job = started()
    lose(job, B)
    assert job.record("member_lost")["rank"] == 1 and not any(isinstance(c, StepDown) for c in job.log)


def test_a_wait_for_nodes_ends_no_job_without_a_majority() -> None:
    """Regression: the start-up time of a leader that was cut off ended the job of the other side."""
    job = training()
    job.controller.recovery.phase = "waiting"
    part(job, B, C)
    job.post(Tick(name="startup"))
    assert not any(isinstance(c, Finish) for c in job.log)
    assert SetTimer(name="startup", delay_s=job.config.beat_s) in job.last
    for node in (B, C):
        job.post(AgentBeat(node_id=node))
    job.controller.recovery.phase = "waiting"
    job.post(Tick(name="startup"))
    assert any(isinstance(c, Finish) for c in job.last)


def test_without_a_majority_nothing_is_decided() -> None:
    job = started()
    lose(job, B, C)
    assert any(isinstance(c, StepDown) for c in job.log)
    assert "only 1 of 3 agents are heard" in job.record("stood_down")["reason"]
    assert not any(r.kind in ("member_lost", "fenced") for r in job.records)
    assert job.post(Tick(name="beat")) == []


def training() -> Job:
    """Return a job whose two ranks train on A and B, with C as a spare."""
    job = started()
    job.hello()
    job.open(4, live=True)
    for member in job.members:
        job.post(StepReached(member_id=member, generation=job.generation, step=5))
    return job


def part(job: Job, *nodes: NodeId) -> None:
    """Close the connections of these nodes. They may come back."""
    for node in nodes:
        job.post(AgentGone(node_id=node))


def kinds(job: Job) -> set[str]:
    """Return the kinds of all records."""
    return {record.kind for record in job.records}


def test_a_leader_without_a_majority_takes_no_request_to_exit_until_it_hears_one_again() -> None:
    job = training()
    part(job, B, C)
    job.post(ExitRun(grace_s=30.0, source="command line"))
    assert "exit_requested" not in kinds(job) and not job.sent(ExitOrder)
    job.post(Tick(name="beat"), 0.5)
    assert "exit_requested" not in kinds(job)
    job.post(AgentBeat(node_id=C))
    job.post(Tick(name="beat"), 0.5)
    assert job.record("exit_requested")["grace_s"] == pytest.approx(29.0, abs=0.1)
    assert len(job.sent(ExitOrder)) == 2


def test_a_request_that_waits_for_a_majority_can_be_taken_back() -> None:
    job = training()
    part(job, B, C)
    job.post(ExitRun(grace_s=30.0, source="command line"))
    job.post(ExitRun(grace_s=0.0, source="command line", cancel=True))
    job.post(AgentBeat(node_id=C))
    job.post(Tick(name="beat"), 0.5)
    assert "exit_requested" not in kinds(job)


def test_a_leader_without_a_majority_ends_nothing_at_a_deadline() -> None:
    job = training()
    job.post(ExitRun(grace_s=30.0, source="command line"))
    part(job, B, C)
    job.post(Tick(name="exit"), 30.0)
    assert not job.sent(KillMember) and SetTimer(name="exit", delay_s=1.0) in job.last
    job.post(AgentBeat(node_id=C))
    job.post(Tick(name="exit"), 1.0)
    assert job.sent(KillMember)


def test_a_leader_without_a_majority_makes_no_decision_about_a_fault() -> None:
    job = training()
    job.exit(0)
    part(job, B, C)
    job.post(Settled(member_id=job.members[1], generation=job.generation, state="aborted", step=5))
    assert not {"planned", "verdict"} & kinds(job)
    job.post(AgentBeat(node_id=B))
    job.post(Tick(name="beat"), 0.5)
    assert {"planned", "verdict"} <= kinds(job)


def test_a_leader_without_a_majority_lets_no_node_depart_and_saves_for_none() -> None:
    job = training()
    part(job, B, C)
    job.post(ExitRun(grace_s=300.0, source="SIGTERM", node_id=A))
    for _ in range(8):
        job.post(Tick(name="depart"), 1.0)
    assert not {"node_left", "exit_requested", "fenced"} & kinds(job)


def test_a_leader_that_hears_no_majority_from_its_start_stands_down() -> None:
    """Voters without ranks that never come are not reported as lost."""
    job = Job(world_size=2, nnodes=1, voters=(A, B, C), term=2, past=past_of(Job(world_size=2).up()))
    seen = tuple(MemberSeen(MemberId(m), Generation(1, 1), m - 1, 100 + m, "ready", 5) for m in (1, 2))
    job.post(AgentHello(node_id=A, slots=2, pid=1, members=seen, host="hA", port=7))
    for _ in range(40):
        job.post(AgentBeat(node_id=A))
        job.post(Tick(name="beat"), 0.5)
    assert "only 1 of 3 agents are heard" in job.record("stood_down")["reason"]


@pytest.mark.parametrize("fenced", [False, True])
def test_a_minority_asks_no_rank_for_the_exit_and_logs_none(fenced: bool) -> None:
    """Regression: its rank took the flag into the vote of all ranks once they met again, and the whole job ended."""
    job = take_over(alone=2, fenced=fenced)
    member, generation = MemberId(2), job.generation if fenced else Generation(1, 1)
    job.post(SessionOpened(member_id=member, generation=Generation(1, 1), step=4, root="/ck", live=True))
    job.post(ExitRun(grace_s=30.0, source="command line"))
    job.post(ExitAgreed(member_id=member, generation=generation, step=5))
    orders = [c for c in job.log if isinstance(c, Send) and isinstance(c.message, ExitOrder)]
    assert not orders and not {"exit_agreed", "exit_requested"} & kinds(job)


def rolled(job: Job) -> list[tuple[NodeId, ...]]:
    """Return the lists of nodes that the agents were sent, in order, without repetitions."""
    lists = [c.message.up for c in job.log if isinstance(c, Send) and isinstance(c.message, Rolled)]
    return [each for each, before in zip(lists, [(), *lists], strict=False) if each != before]


def test_the_agents_are_told_of_a_loss_so_that_the_electorate_follows() -> None:
    job = started()
    assert rolled(job) == [(A, B, C)]
    lose(job, C)
    assert rolled(job) == [(A, B, C), (A, B)]


def test_a_minority_shrinks_no_electorate_around_itself() -> None:
    job = started()
    lose(job, B, C)
    assert rolled(job) == [(A, B, C)]


def test_who_is_only_away_for_a_moment_keeps_its_vote() -> None:
    job = started()
    job.post(AgentGone(node_id=C))
    job.post(AgentHello(node_id=B, slots=1, pid=7, host="hB", port=7))
    assert rolled(job) == [(A, B, C)]


def test_a_successor_gives_the_voters_time_to_come() -> None:
    job = Job(world_size=2, nnodes=2, voters=(A, B, C), term=2, past=past_of(started()))
    for node in (B, C):
        job.post(AgentHello(node_id=node, slots=1, pid=1, host="h", port=7))
    assert rolled(job) == []
    job.post(Tick(name="roll"), 2.0)
    assert rolled(job) == [(B, C)]


def test_an_electorate_of_one_decides_alone() -> None:
    job = started()
    job.post(VotersAre(voters=(A,)))
    lose(job, B, C)
    assert job.record("member_lost")["rank"] == 1 and not any(isinstance(c, StepDown) for c in job.log)


def past_of(job: Job) -> ReplayedState:
    return ReplayedState.read(job.records)


def take_over(alone: int, *, fenced: bool = True) -> Job:
    """Return a controller on B's node, where rank 1 lives. A and its rank are gone.

    Args:
        fenced: the time for other nodes to come is over.
    """
    before = started()
    job = Job(
        world_size=2,
        nnodes=2,
        several=True,
        voters=(A, B, C),
        term=1 if alone else 2,
        alone=alone,
        past=past_of(before),
    )
    seen = MemberSeen(MemberId(2), Generation(1, 1), 1, 102, "ready", 5)
    job.post(AgentHello(node_id=B, slots=1, pid=1, members=(seen,), host="hB", port=7))
    layouts = Layouts.of({0: Layout(b"{}", b""), 1: Layout(b"{}", b"")})
    job.post(
        Catalogued(
            member_id=MemberId(2),
            generation=Generation(1, 1),
            version=LayoutVersion(Generation(1, 1), 0),
            layouts=layouts,
        )
    )
    if not alone:
        job.post(AgentHello(node_id=C, slots=1, pid=2, host="hC", port=7))
        job.post(AgentBeat(node_id=C))
    job.post(AgentBeat(node_id=B))
    if fenced:
        job.post(Tick(name="rejoin"), 2.0)
    return job


def test_a_successor_loses_the_nodes_that_do_not_come() -> None:
    job = take_over(alone=0)
    assert job.record("node_lost")["node"] == A and job.record("adopted")["dead"] == [0]
    assert job.record("fenced")["generation"].startswith("2.")
    assert set(job.controller.job.roster.layouts) == {0, 1}, "from what the agents remember"
    assert job.controller.job.last_member >= 1_000_000, "no id is used twice"


def test_a_voter_that_continues_alone_numbers_its_members_apart() -> None:
    """Regression: the log of the host that the witness chose lacked the last start of the other host.

    Both hosts had members 5 and 6 (seed 61055 of the simulated hosts).
    """
    job = Job(world_size=2, nnodes=2, several=True, term=2, past=past_of(started()))
    assert job.controller.job.last_member == 1_000_000


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
    assert finish.code == Exit.UNSAVED and "no majority" in finish.reason


def test_the_successor_of_a_controller_that_was_alone_goes_on_with_its_numbers() -> None:
    first = take_over(alone=2)
    again = Job(world_size=2, nnodes=2, voters=(A, B, C), alone=2, past=past_of(first))
    assert again.controller.job.generation == first.controller.job.generation


def test_a_spare_takes_the_seats_of_a_lost_node() -> None:
    before = {0: A, 1: A, 2: B, 3: B}
    seats = assign([(B, 2), (C, 2)], 4, 10, before)
    assert {node: [(a.rank, a.local_rank) for a in here] for node, here in seats.items()} == {
        B: [(2, 0), (3, 1)],
        C: [(0, 0), (1, 1)],
    }
    assert assign([(B, 2)], 4, 10, before) == {}


def smaller(nodes_min: int, nodes: int = 4, per_node: int = 2) -> Job:
    """Return a job of ``nodes`` nodes at step 6, in which every rank holds all boxes."""
    names = [NodeId(f"node{i}") for i in range(nodes)]
    job = Job(world_size=nodes * per_node, nnodes=nodes, voters=tuple(names), nodes_min=nodes_min)
    for node in names:
        job.post(AgentHello(node_id=node, slots=per_node, pid=1, host=node, port=7))
    job.hello()
    job.open(5)
    for member in job.members:
        job.post(StepReached(member_id=member, generation=job.generation, step=6))
    return job


def drop(job: Job, *lost: NodeId) -> None:
    """Lose nodes for good. The living ranks settle, save and exit, as ordered."""
    names = set(job.controller.job.slots)
    for node in lost:
        job.post(AgentGone(node_id=node))
    while job.controller.recovery.phase in ("idle", "grace"):
        beat(job, names - set(lost))
    come_to_rest(job)


def beat(job: Job, nodes: set[NodeId]) -> None:
    for node in nodes:
        job.post(AgentBeat(node_id=node), 0.0)
    job.post(Tick(name="beat"), 0.5)


def come_to_rest(job: Job, step: int = 6) -> None:
    """Take the ranks from the fence to the order to exit, and let them exit."""
    roster = job.controller.job.roster
    for member in list(roster.living):
        job.post(
            Settled(
                member_id=member.member_id, generation=job.generation, state="ready", step=step, freed_ns=1
            )
        )
    order = next(s.save for s in job.sent(Settle) if s.save is not None)
    for rank in order.sources:
        member_id = next(m.member_id for m in roster.members if m.rank == rank)
        last = rank == order.sources[-1]
        job.post(
            SaveReported(
                member_id=member_id,
                generation=job.generation,
                save_id=order.save_id,
                size_bytes=1,
                duration_s=0.1,
                sealed=last,
            )
        )
    for member in list(roster.living):
        job.post(
            MemberExited(
                member_id=member.member_id, node_id=member.node_id, generation=job.generation, code=int(Exit.RESTART),
                signal=None, state="aborted", step=step, detail="left",
            )
        )  # fmt: skip


def test_half_of_the_nodes_go_on_and_the_rest_is_taken_back() -> None:
    job = smaller(nodes_min=2)
    drop(job, NodeId("node1"))
    # 3 nodes do not divide 4 ranks: 2 nodes are used
    assert job.record("resized") == {"ranks_before": 8, "ranks": 4}
    orders = job.sent(StartMembers)
    assert [(o.node_id, o.world_size, [a.rank for a in o.members]) for o in orders] == [
        (NodeId("node0"), 4, [0, 1]),
        (NodeId("node2"), 4, [2, 3]),
    ]
    job.hello()
    job.open(6)
    for member in job.members:
        job.post(StepReached(member_id=member, generation=job.generation, step=7))
    assert job.controller.recovery.phase == "idle"
    job.post(AgentHello(node_id=NodeId("node1"), slots=2, pid=2, host="node1", port=7))
    beat(job, set(job.controller.job.slots))
    assert job.record("fenced")["reason"] == "there is room for 8 ranks"
    come_to_rest(job, 7)
    assert "there is room for 8 ranks, 4 now" in job.record("verdict")["reason"]
    assert job.record("resized") == {"ranks_before": 4, "ranks": 8}
    assert [o.world_size for o in job.sent(StartMembers)] == [8] * 4
    # A controller of the next term knows the present number of ranks.
    past = past_of(job)
    assert Job(world_size=8, nnodes=4, nodes_min=2, past=past, term=2).controller.job.world_size == 8


def test_too_few_nodes_wait() -> None:
    job = smaller(nodes_min=4)
    drop(job, NodeId("node1"))
    assert job.controller.recovery.phase == "waiting"
    assert not any(r.kind == "resized" for r in job.records)


def test_a_node_that_was_silent_for_a_while_is_not_waited_for_when_it_is_back() -> None:
    """Regression: the node's connection stayed open, so it sent no second hello.

    The job waited 120 s for one, and ended.
    """
    job = Job(world_size=2).up(3)
    job.exit(0)
    job.settle(1, "aborted", 5)
    job.seal(job.sent(Settle)[0])
    for _ in range(4):
        job.post(Tick(name="beat"), 1.0)
    job.exit(1, "aborted", code=int(Exit.RESTART))
    assert job.record("node_suspected")["reason"] == "no heartbeat for 3 s"
    assert job.controller.recovery.phase == "waiting"
    job.post(AgentBeat(node_id=A))
    (order,) = job.sent(StartMembers)
    assert [seat.rank for seat in order.members] == [0, 1]


def test_who_waits_for_nodes_waits_for_enough_of_them_and_not_for_ever() -> None:
    """Regression: each return of an unstable node made the others wait another 120 s."""
    job = smaller(nodes_min=4)
    drop(job, NodeId("node1"))
    said = len(job.log)
    job.post(AgentHello(node_id=NodeId("node2"), slots=2, pid=2, host="node2", port=7))
    beat(job, set(job.controller.job.slots))
    assert job.controller.recovery.phase == "waiting"
    assert SetTimer(name="startup", delay_s=120.0) not in job.log[said:]


def test_a_newcomer_takes_the_rank_of_a_lost_node_on_one_with_a_free_slot() -> None:
    job = started()
    places = job.controller.job.places
    members = job.controller.job.roster.members
    assert places(members) == {0: (A, 0), 1: (B, 0)}, "a rank that can stay stays"
    lose(job, B)
    assert places([members[1]]) == {1: (C, 0)}
    lose(job, B, C)
    assert places([members[1]]) == {}


def test_layouts_of_survivors_count_beside_those_of_newcomers() -> None:
    job = started()
    roster = job.controller.job.roster

    def publish(rank: int, version: LayoutVersion, generation: Generation) -> bool:
        layout = LayoutPublished(
            member_id=roster.members[rank].member_id,
            generation=generation,
            rank=rank,
            version=version,
            layout=Layout(b"{}", b""),
        )
        return roster.publish(layout, 2) is not None

    first, second = Generation(1, 1), Generation(1, 2)
    assert not publish(1, LayoutVersion(first, 3), first), "rank 0 died before it published its second layout"
    assert roster.agreed(2) == NO_VERSION, "its newcomer has published none"
    assert not publish(0, NO_VERSION, second)
    assert [publish(rank, LayoutVersion(second, 1), second) for rank in (0, 1)] == [False, True]
    assert roster.agreed(2) == LayoutVersion(second, 1)
