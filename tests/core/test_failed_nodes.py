"""Nodes that fail again and again: which faults count, when a node is left out, and when it is used again."""

from __future__ import annotations

import itertools
from typing import Any, Literal

import msgspec
import pytest

from holdfast.core.decide.stop_policy import Failure
from holdfast.core.ids import Generation, MemberId, NodeId
from holdfast.core.job.failed_nodes import (
    LOST,
    FailedNodes,
    NodeFault,
    cause_of,
    failing_until,
    leave_out,
)
from holdfast.core.job.fault import Fault, FaultKind
from holdfast.core.job.log_replay import ReplayedState
from holdfast.core.protocol.messages import (
    AgentBeat,
    AgentHello,
    JoinAsked,
    Joined,
    KillMember,
    LogRecord,
    MemberExited,
    MemberSeen,
    MemberStarted,
    ResumeInPlace,
    SessionOpened,
    Settled,
    StartMembers,
    StateOffered,
    StepReached,
    Tick,
    WorkerHello,
)
from holdfast.core.protocol.notices import (
    BY_HAND,
    HoldOrder,
    HoldReached,
    Notice,
    PrepareSeats,
    SeatsPrepared,
)
from tests.core.test_controller import Job
from tests.core.test_departure import kinds, orders, trains
from tests.core.test_nodes import A, B, C

WINDOW_S = 3600.0


def fault_at(node: NodeId, at_s: float, **how: Any) -> NodeFault:
    """Return a fault of a node, in a new generation."""
    return NodeFault(**{"node_id": node, "at_s": at_s, "cause": "signal", "occurrence": int(at_s), **how})


def counted(*faults: NodeFault, faults_max: int = 3) -> FailedNodes:
    """Return the nodes after these faults."""
    nodes = FailedNodes((), (), faults_max, WINDOW_S)
    for fault in faults:
        nodes.note(fault.at_s, fault)
    return nodes


@pytest.mark.parametrize(
    ("kind", "signal", "how", "cause"),
    [
        ("signal", 9, {}, "signal"),
        ("signal", 11, {}, "signal"),
        ("signal", 15, {}, ""),
        ("signal", 6, {}, ""),
        ("signal", 9, {"follows": True}, ""),
        ("exit", None, {}, ""),
        ("exception", None, {}, ""),
        ("device", None, {}, "device"),
        ("silent", 9, {}, "silent"),
        ("hang", 9, {}, "hang"),
        ("hang", 9, {"failure": Failure(rank=1, step=5, kind="Hang", what="", digest="")}, ""),
        ("corruption", 9, {}, "corruption"),
        ("corruption", 9, {"sure": False}, ""),
        ("collective", None, {}, ""),
        ("leave", 9, {}, ""),
        ("controller", None, {}, ""),
    ],
)
def test_the_faults_that_count(kind: FaultKind, signal: int | None, how: dict[str, Any], cause: str) -> None:
    fault = Fault(rank=1, member_id=2, kind=kind, what="", step=5, at_s=0.0, **how)
    assert cause_of(fault, signal, without_page=False) == cause
    assert cause_of(fault, signal, without_page=True) == "", "the loss of the node counts itself"


@pytest.mark.parametrize(
    ("times_s", "until_s"),
    [
        ([], 0.0),
        ([10.0, 20.0], 0.0),
        ([10.0, 20.0, 30.0], 3630.0),
        ([0.0, 1800.0, 3600.0], 7200.0),
        ([0.0, 1800.0, 3601.0], 0.0),
        ([0.0, 10.0, 20.0, 9000.0], 3620.0),
        ([0.0, 10.0, 20.0, 3000.0, 3010.0], 6610.0),
    ],
)
def test_the_window(times_s: list[float], until_s: float) -> None:
    assert failing_until(times_s, 3, WINDOW_S) == until_s
    assert failing_until(times_s, 0, WINDOW_S) == 0.0, "0 faults: never"


def test_all_deaths_of_one_generation_are_one_fault() -> None:
    nodes = counted(*(fault_at(A, float(n), occurrence=7) for n in range(5)))
    assert not nodes.failing and len(nodes.faults_of(9.0, A)) == 1


def test_a_death_that_occurs_on_two_nodes_at_one_step_is_the_scripts() -> None:
    same = {"digest": "death of rank 1 in backward by signal 11", "step": 40}
    faults = [fault_at(A, 1.0), fault_at(A, 2.0), fault_at(A, 3.0, **same)]
    assert counted(*faults).failing == (A,)
    assert counted(*faults, fault_at(B, 4.0, **same)).failing == ()


def test_the_worst_node_is_first() -> None:
    faults = [fault_at(A, n + 1.0) for n in range(3)] + [fault_at(B, n + 11.0) for n in range(4)]
    nodes = counted(*faults)
    assert list(nodes.failing) == [B, A]
    nodes.look(3.0 + WINDOW_S)
    assert list(nodes.failing) == [B], "a whole window after the fault that made it failing"
    nodes.forget(B)
    assert not nodes.failing


def test_a_node_is_left_out_only_while_the_others_hold_the_job() -> None:
    """Every choice of slots and failing nodes: as many ranks have a place as without the rule."""
    nodes = (A, B, C)
    for slots in itertools.product((0, 1, 2), repeat=3):
        up = list(zip(nodes, slots, strict=True))
        for world in range(1, 5):
            for count in range(4):
                for failing in itertools.permutations(nodes, count):
                    used = leave_out(up, failing, lambda _, ranks=world: ranks)  # type: ignore[misc]
                    have = sum(slots)
                    assert sum(n for _, n in used) >= min(have, world) if have >= world else used == up
                    assert set(used) <= set(up)
                    out = [node for node, _ in up if node not in dict(used)]
                    assert set(out) <= set(failing)
                    for node in failing:  # none that could be left out is used
                        rest = sum(n for other, n in used if other != node)
                        assert node in out or rest < world


# ------------------------------------------------------------------------------------------------ the controller


def training(**config: Any) -> Job:
    """Return a job with two training ranks on A and two on B, with live sessions; C waits with two free slots."""
    job = Job(world_size=4, nnodes=2, voters=(A, B, C), **config)
    for number, node in enumerate((C, A, B)):
        job.post(AgentHello(node_id=node, slots=2, pid=number, host=f"h{node}", port=7))
    job.hello()
    job.open(20, live=True)
    trains(job, 21)
    return job


def where(job: Job) -> list[NodeId]:
    """Return the node of each rank."""
    return [member.node_id for member in job.controller.job.roster.members]


def dies(job: Job, rank: int, signal: int | None = 9, code: int | None = None) -> NodeId:
    """Kill the process of a rank and run the recovery. Return the node of its replacement."""
    old = job.controller.job.roster.members[rank]
    step = max(m.step for m in job.controller.job.roster.members)
    job.post(
        MemberExited(
            member_id=old.member_id, node_id=old.node_id, generation=job.generation, code=code, signal=signal,
            state="compute", step=step, detail="backward", died_ns=int(job.now * 1e9),
        )
    )  # fmt: skip
    recover(job, [rank], step)
    return where(job)[rank]


def recover(job: Job, ranks: list[int], step: int) -> None:
    """Run the recovery of dead ranks at a step up to the next step."""
    generation = job.generation
    survivors = [m for m in job.controller.job.roster.members if m.rank not in ranks]
    started: list[StartMembers] = []
    for member in survivors:
        job.post(Settled(member_id=member.member_id, generation=generation, state="ready", step=step))
        started += job.sent(StartMembers)
    seats = [(order.node_id, seat) for order in started for seat in order.members]
    assert sorted(seat.rank for _, seat in seats) == ranks
    for node, seat in seats:
        job.post(MemberStarted(member_id=seat.member_id, node_id=node, pid=7))
        job.post(WorkerHello(member_id=seat.member_id, generation=generation, rank=seat.rank, pid=7))
    for member in survivors:
        job.post(StateOffered(member_id=member.member_id, generation=generation, step=step, host="h", port=1))
    for _, seat in seats:
        job.post(JoinAsked(member_id=seat.member_id, generation=generation))
        job.post(
            SessionOpened(member_id=seat.member_id, generation=generation, step=step, root="/ck", live=True)
        )
        job.post(Joined(member_id=seat.member_id, generation=generation, step=step))
    assert job.sent(ResumeInPlace)
    trains(job, step + 1)


def beat(job: Job, after_s: float = 0.5) -> None:
    """Let the heartbeats of all nodes come, then the controller's own look at them."""
    job.now += after_s
    for node in (A, B, C):
        if node in job.controller.job.slots:
            job.post(AgentBeat(node_id=node))
    job.post(Tick(name="beat"))


def test_a_node_whose_ranks_die_again_and_again_is_left_out() -> None:
    job = training()
    assert [dies(job, 2), dies(job, 3)] == [B, B]
    assert dies(job, 2) == C, "the third fault"
    beat(job)
    assert job.record("node_left_out") == {
        "node": B, "causes": ["signal"] * 3, "window_s": WINDOW_S
    }  # fmt: skip
    (order,) = orders(job, PrepareSeats)
    assert (order.node_id, [seat.rank for seat in order.members]) == (C, [3]), "its other rank moves"
    job.post(SeatsPrepared(node_id=C, ranks=(3,)))
    assert orders(job, HoldOrder)
    job.post(HoldReached(member_id=job.members[0], generation=job.generation, step=25))
    assert job.record("detected")["kind"] == "leave"
    (kill,) = job.sent(KillMember)
    assert kill.node_id == B and "left out" in kill.reason
    job.post(
        MemberExited(
            member_id=kill.member_id, node_id=B, generation=job.generation, code=None, signal=9, state="ready",
            step=25, detail="ready",
        )
    )  # fmt: skip
    recover(job, [3], 25)
    assert where(job) == [A, A, C, C]
    for _ in range(3):
        beat(job)
        job.post(Tick(name="depart"), 5.0)
    assert not {"node_left", "exit_requested", "node_leaves"} & kinds(job), "its agent stays, with its vote"
    assert job.records[-1].kind != "node_left_out" and len(announced(job)) == 1
    assert not job.controller.job.leaving


def announced(job: Job) -> list[LogRecord]:
    """Return the records that announce something about a failing node."""
    return [r for r in job.records if r.kind in ("node_left_out", "node_kept", "node_used_again")]


def test_the_last_place_that_can_run_the_job_is_kept_with_one_warning() -> None:
    job = Job(world_size=4, nnodes=2, voters=(A, B))
    for node in (A, B):
        job.post(AgentHello(node_id=node, slots=2, pid=1, host="h", port=7))
    job.hello()
    job.open(20, live=True)
    trains(job, 21)
    for _ in range(3):
        assert dies(job, 2) == B and dies(job, 0) == A
        beat(job)
    assert [(r.kind, r.data["node"]) for r in announced(job)] == [("node_kept", A), ("node_kept", B)]
    assert not orders(job, PrepareSeats)


def test_a_spare_that_comes_later_takes_the_ranks() -> None:
    job = Job(world_size=4, nnodes=2, voters=(A, B))
    for node in (A, B):
        job.post(AgentHello(node_id=node, slots=2, pid=1, host="h", port=7))
    job.hello()
    job.open(20, live=True)
    trains(job, 21)
    for _ in range(3):
        assert dies(job, 2) == B
    beat(job)
    job.post(AgentHello(node_id=C, slots=2, pid=1, host="h", port=7))
    beat(job)
    assert [r.kind for r in announced(job)] == ["node_kept", "node_left_out"]
    assert [seat.rank for seat in orders(job, PrepareSeats)[-1].members] == [2, 3]


def test_faults_of_the_script_leave_no_node_out() -> None:
    job = training()
    for _ in range(3):
        assert dies(job, 2, signal=None, code=3) == B
    assert "node_failed" not in kinds(job)


def test_the_count_is_off_with_0_faults() -> None:
    job = training(node_faults_max=0)
    for _ in range(6):
        assert dies(job, 2) == B
    assert "node_failed" not in kinds(job)


def left_out() -> Job:
    """Return a job that has left B out; its last rank there is about to move."""
    job = training()
    for rank in (2, 3, 2):
        dies(job, rank)
    beat(job)
    return job


def test_a_user_takes_the_node_back() -> None:
    job = left_out()
    job.post(Notice(node_id=B, source=BY_HAND, withdrawn=True))
    assert job.record("node_used_again") == {"node": B, "reason": "a user takes it back"}
    assert orders(job, PrepareSeats)[-1].members == (), "the processes for the move are ended"
    assert dies(job, 3) == B and len(announced(job)) == 2
    assert not ReplayedState.read(job.records).failing_nodes


def test_after_the_window_the_node_is_used_again() -> None:
    job = left_out()
    beat(job, WINDOW_S - 2.0)
    assert [r.kind for r in announced(job)] == ["node_left_out"]
    beat(job, 3.0)
    assert job.record("node_used_again")["node"] == B
    assert dies(job, 3) == B


@pytest.mark.parametrize("written", ["records", "snapshot"])
def test_the_next_controller_leaves_it_out_too(written: Literal["records", "snapshot"]) -> None:
    job = left_out()
    past = ReplayedState.read(job.records)
    assert len(past.node_faults) == 3 and past.failing_nodes == ((B, "left_out"),)
    if written == "snapshot":
        snapshot = past.snapshot(job.now)
        later = LogRecord(kind=snapshot.kind, data={**snapshot.data, "read_s": job.now + 100.0})
        moved = ReplayedState.read([later])
        assert [
            after.at_s - before.at_s
            for before, after in zip(past.node_faults, moved.node_faults, strict=True)
        ] == [100.0] * 3
        past = msgspec.structs.replace(moved, node_faults=past.node_faults)
    second = Job(world_size=4, nnodes=2, voters=(A, B, C), term=2, past=past)
    second.now = job.now
    roster = job.controller.job.roster
    for node in (A, B, C):
        members = tuple(
            MemberSeen(MemberId(m.member_id), Generation(1, 1), m.rank, 7, "ready", 24)
            for m in roster.members
            if m.node_id == node
        )
        second.post(AgentHello(node_id=node, slots=2, pid=1, members=members, host=f"h{node}", port=7))
    for member in roster.members:
        second.controller.job.roster.members[member.rank].live = True
        second.controller.job.roster.members[member.rank].opened_step = 20
    beat(second)
    for member in roster.members:
        second.post(StepReached(member_id=member.member_id, generation=second.generation, step=25))
    beat(second)
    assert second.record("adopted")["fenced"] is False and not announced(second)
    assert orders(second, PrepareSeats)[-1].members[0].rank == 3, "the move is begun again"


def test_a_node_that_is_lost_again_and_again_gets_no_ranks_when_it_comes_back() -> None:
    job = training()
    job.controller.job.liveness.voters = ()
    for _ in range(3):
        job.post(Tick(name="beat"), 0.1)
        job.controller.job.liveness.gone(C, job.now)
        for _ in range(30):
            for node in (A, B):
                job.post(AgentBeat(node_id=node), 0.0)
            job.post(Tick(name="beat"), 0.5)
        assert job.record("node_lost")["node"] == C
        job.post(AgentHello(node_id=C, slots=2, pid=1, host="h", port=7))
    beat(job)
    assert job.record("node_left_out") == {"node": C, "causes": [LOST] * 3, "window_s": WINDOW_S}
    assert job.controller.job.heard() == {A, B}
