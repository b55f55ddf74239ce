"""The controller and a job without progress: it collects evidence from every node, then declares one fault."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from holdfast.core.ids import NodeId
from holdfast.core.protocol.health_messages import (
    LAST_LOOK,
    CollectEvidence,
    CollectiveSeen,
    Evidence,
    Late,
    ProgressResumed,
    RankEvidence,
    Stalled,
)
from holdfast.core.protocol.messages import (
    AgentHello,
    CancelTimer,
    Fence,
    JoinAsked,
    KillMember,
    MemberSeen,
    MemberStarted,
    ResumeInPlace,
    SetTimer,
    Settle,
    StartMembers,
    StepReached,
    Tick,
    WorkerHello,
)
from holdfast.core.watch.hang_detection import GATHER_S
from tests.core.test_controller import NODE, Job
from tests.core.test_nodes import A, B, started


def stalled(job: Job, idle_s: float = 2.0) -> Stalled:
    generation = job.controller.job.roster.generation
    return Stalled(node_id=NODE, generation=generation, idle_s=idle_s, bound_s=1.8, step_s=0.18)


def evidence(job: Job, number: int, **odd: str | float) -> Evidence:
    """Return evidence of every rank in backward. Rank 1 differs by ``odd``."""
    ranks = []
    for rank, member in enumerate(job.members):
        facts = {"phase": "backward", "process": "S", "cpu": 0.0, **(odd if rank == 1 else {})}
        ranks.append(
            RankEvidence(
                member_id=member,
                rank=rank,
                step=5,
                idle_s=2.1,
                bound_s=1.8,
                phase=str(facts["phase"]),
                process=str(facts["process"]),
                cpu=float(facts["cpu"]),
            )
        )
    return Evidence(node_id=NODE, number=number, ranks=tuple(ranks))


def test_evidence_comes_before_the_kill_and_the_fault_is_a_hang() -> None:
    job = Job().up()
    job.now = 100.0
    job.post(stalled(job))
    (order,) = job.sent(CollectEvidence)
    assert job.sent(KillMember) == []
    job.post(evidence(job, order.number, process="T"))
    (kill,) = job.sent(KillMember)
    assert kill.member_id == job.members[1] and "stopped (state T)" in kill.reason
    found = job.record("hang")
    assert (found["answer"], found["ranks"], found["confidence"]) == ("kill", [1], "certain")
    assert len(found["evidence"]) == 3
    job.exit(1)
    detected = job.record("detected")
    assert detected["kind"] == "hang" and detected["what"].startswith("hangs: its process is stopped")
    assert 2.1 <= detected["detected_s"] < 2.3, "dated from the beginning of the stillness"


def test_a_worker_that_moves_takes_everything_back() -> None:
    job = Job().up()
    job.post(stalled(job))
    (order,) = job.sent(CollectEvidence)
    job.post(ProgressResumed(node_id=NODE, generation=job.generation))
    assert CancelTimer(name="gather") in job.last
    job.post(evidence(job, order.number, process="T"))
    job.post(Tick(name="gather"))
    assert job.sent(KillMember) == [] and not any(r.kind == "hang" for r in job.records)


def test_nobody_to_blame_is_a_fence_and_a_retry_in_place() -> None:
    job = Job().up()
    job.post(stalled(job))
    job.post(evidence(job, job.sent(CollectEvidence)[0].number))
    assert len(job.sent(Fence)) == 3 and job.sent(KillMember) == []
    for rank in range(3):
        job.settle(rank, "aborted", 5)
    assert job.record("verdict")["action"] == "retry_in_place"
    assert [(r.member_id, r.generation.n, r.step) for r in job.sent(ResumeInPlace)] == [
        (1, 2, 5),
        (2, 2, 5),
        (3, 2, 5),
    ]


def test_a_hang_of_all_at_the_same_step_twice_ends_the_run() -> None:
    """The ranks call collectives that do not match.

    Regression: 16 rounds of this, each with the delay of a detection.
    """
    job = Job().up()
    for number in range(2):
        job.post(stalled(job))
        job.post(evidence(job, job.sent(CollectEvidence)[0].number))
        for rank in range(3):
            job.settle(rank, "aborted", 5)
        if number == 0:
            for member in job.members:
                job.post(StepReached(member_id=member, generation=job.generation, step=5))
    verdict = job.record("verdict")
    assert (
        verdict["action"] == "stop_user_bug" and "the same hang at step 5 twice: Hang: " in verdict["reason"]
    )


@pytest.mark.parametrize(("second", "action"), [("world", "retry_in_place"), ("other", "stop_user_bug")])
def test_a_hang_of_all_in_one_collective_between_nodes_is_tried_again(second: str, action: str) -> None:
    """Regression, found by ``make nemesis``: 3 s of a bad cable ended the run as a bug of its script."""
    job = started()
    for rank, (member, node) in enumerate(zip(job.members, (A, B), strict=True)):
        job.post(MemberStarted(member_id=member, node_id=node, pid=100 + member))
        job.post(WorkerHello(member_id=member, generation=job.generation, rank=rank, pid=100 + member))
    job.open(0)
    for step in (1, 5, 5):
        for member in job.members:
            job.post(StepReached(member_id=member, generation=job.generation, step=step))
        if step == 1:
            continue
        for node in (A, B):
            job.post(msgspec.structs.replace(stalled(job), node_id=node))
        number = job.sent(CollectEvidence)[0].number
        whole = evidence(job, number)
        for node, one, group in zip((A, B), whole.ranks, ("world", second), strict=True):
            waits = CollectiveSeen(group, 173, "all_reduce of 577 float32", under_way=True)
            ranks = (msgspec.structs.replace(one, collectives=(waits,)),)
            job.post(Evidence(node_id=node, number=number, ranks=ranks))
        for rank in range(2):
            job.settle(rank, "aborted", 5)
    assert job.record("verdict")["action"] == action


def test_when_all_compute_it_is_slow_and_looked_at_again_later() -> None:
    job = Job(patience_s=60.0).up()
    job.post(stalled(job))
    number = job.sent(CollectEvidence)[0].number
    busy = evidence(job, number)
    ranks = tuple(
        RankEvidence(
            member_id=e.member_id, rank=e.rank, step=5, phase="backward", idle_s=2.0, bound_s=1.8, cpu=1.0
        )
        for e in busy.ranks
    )
    job.post(Evidence(node_id=NODE, number=number, ranks=ranks))
    assert job.sent(KillMember) == [] and job.sent(Fence) == []
    (timer,) = [c for c in job.last if isinstance(c, SetTimer)]
    assert timer.name == "patience"
    job.post(stalled(job))
    assert job.sent(CollectEvidence) == [], "not before its patience is over"
    job.post(Tick(name="patience"))
    assert len(job.sent(CollectEvidence)) == 1


def test_during_a_recovery_nothing_is_judged() -> None:
    job = Job().up()
    job.post(stalled(job))
    number = job.sent(CollectEvidence)[0].number
    job.exit(2)
    job.post(evidence(job, number, process="T"))
    assert job.sent(KillMember) == []
    job.post(stalled(job))
    assert job.sent(CollectEvidence) == []


def newcomer() -> Job:
    """Return a job that has lost rank 1, with a newcomer starting in its seat."""
    job = Job()
    job.post(AgentHello(node_id=NODE, slots=3, pid=1))
    job.hello()
    job.open(0, live=True)
    job.exit(1)
    for rank in (0, 2):
        job.settle(rank, "aborted", 5)
    assert job.record("verdict")["action"] == "replace"
    return job


def late(job: Job, rank: int = 1, *, stopped: bool = False) -> Late:
    return Late(member_id=job.members[rank], node_id=NODE, idle_s=15.2, stopped=stopped)


def seen_late(job: Job, number: int, **more: Any) -> Evidence:
    one = RankEvidence(
        member_id=job.members[1],
        rank=1,
        step=0,
        **{"phase": "starting", "idle_s": 15.6, "bound_s": 15.0, **more},
    )
    return Evidence(node_id=NODE, number=number, ranks=(one,))


@pytest.mark.parametrize(
    ("process", "cpu", "why"),
    [("T", 0.0, "stopped (state T)"), ("R", 1.0, "no progress"), ("S", 0.0, "no pro")],
)
def test_a_newcomer_that_hangs_in_its_start_is_followed_by_another(
    process: str, cpu: float, why: str
) -> None:
    job = newcomer()
    first, generation = job.members[1], job.generation
    job.post(late(job, stopped=process == "T"))
    (order,) = job.sent(CollectEvidence)
    assert job.sent(KillMember) == []
    job.post(late(job, stopped=process == "T"))
    assert job.sent(CollectEvidence) == [], "asked once"
    job.post(seen_late(job, order.number, process=process, cpu=cpu))
    (kill,) = job.sent(KillMember)
    assert kill.member_id == first and why in kill.reason
    assert job.record("hang")["ranks"] == [1] and len(job.record("hang")["evidence"]) == 1
    job.post(late(job))
    assert job.sent(CollectEvidence) == [], "it is being killed"
    job.exit(1, "starting", 0)
    assert job.record("detected")["kind"] == "hang" and job.generation == generation
    assert [a.rank for order in job.sent(StartMembers) for a in order.members] == [1]
    assert job.members[1] > first


def test_a_newcomer_that_waits_for_its_state_is_late_only_when_it_is_stopped() -> None:
    job = newcomer()
    job.post(JoinAsked(member_id=job.members[1], generation=job.generation))
    job.post(late(job))
    assert job.sent(CollectEvidence) == []
    job.post(late(job, stopped=True))
    (order,) = job.sent(CollectEvidence)
    job.post(seen_late(job, order.number, process="S"))
    assert job.sent(KillMember) == [], "it runs again"
    job.post(late(job, stopped=True))
    job.post(seen_late(job, job.sent(CollectEvidence)[0].number, process="T"))
    assert [kill.member_id for kill in job.sent(KillMember)] == [job.members[1]]


def test_a_newcomer_that_moves_meanwhile_lives_and_a_silent_agent_is_asked_again() -> None:
    job = newcomer()
    job.post(late(job))
    assert SetTimer(name="late", delay_s=GATHER_S) in job.last
    job.post(Tick(name="late"))
    job.post(late(job))
    job.post(seen_late(job, job.sent(CollectEvidence)[0].number, idle_s=0.1))
    assert job.sent(KillMember) == [] and not any(r.kind == "hang" for r in job.records)


def test_a_newcomer_that_does_not_join_in_time_is_looked_at_before_its_end() -> None:
    job = newcomer()
    job.post(Tick(name="join"), after_s=120.0)
    (kill,) = job.sent(KillMember)
    assert kill.member_id == job.members[1] and kill.silent and kill.reason == "did not join within 120 s"
    stacks = "evidence/M004/rank-00001.txt"
    job.post(seen_late(job, LAST_LOOK, process="S", bound_s=0.0, where="read (data.py:3)", stacks=stacks))
    found = job.record("hang")
    assert (found["ranks"], found["reason"], found["stacks"]) == ([1], kill.reason, [stacks])
    assert found["evidence"] == [
        "rank 1: its start, still for 15.6 s, process S, cpu 0%, at read (data.py:3)"
    ]
    job.exit(1, "starting", 0)
    assert (job.record("detected")["kind"], job.record("detected")["what"]) == ("silent", kill.reason)
    job.post(seen_late(job, LAST_LOOK, process="S"))
    assert len([r for r in job.records if r.kind == "hang"]) == 1, "its successor lives"


def test_only_a_newcomer_is_late() -> None:
    job = Job().up()
    job.post(late(job, stopped=True))
    assert job.sent(CollectEvidence) == [], "others are judged together"


def test_a_worker_that_is_stopped_before_its_session_opens_is_replaced() -> None:
    job = Job()
    job.post(AgentHello(node_id=NODE, slots=3, pid=1))
    job.hello()
    found = msgspec.structs.replace(stalled(job), stopped=True)
    job.post(found)
    job.post(evidence(job, job.sent(CollectEvidence)[0].number, phase="starting", process="S"))
    assert job.sent(KillMember) == [] and job.sent(Fence) == [], "it runs again, and nothing else is known"
    job.post(found)
    job.post(evidence(job, job.sent(CollectEvidence)[0].number, phase="starting", process="T"))
    assert [kill.member_id for kill in job.sent(KillMember)] == [job.members[1]]


def test_a_script_without_a_session_is_left_alone() -> None:
    job = Job()
    job.post(AgentHello(node_id=NODE, slots=3, pid=1))
    job.hello()
    job.post(stalled(job))
    assert job.sent(CollectEvidence) == []


def test_an_agent_that_does_not_answer_is_left_out() -> None:
    job = Job().up()
    job.post(stalled(job))
    assert SetTimer(name="gather", delay_s=GATHER_S) in job.last
    job.post(Tick(name="gather"))
    assert job.record("hang")["answer"] == "wait"


def test_all_nodes_must_stand_still_and_all_are_asked() -> None:
    job = Job(world_size=2, nnodes=2)
    nodes = [NodeId("a"), NodeId("b")]
    for node in nodes:
        job.post(AgentHello(node_id=node, slots=1, pid=1))
    for member, node in zip(job.members, nodes, strict=True):
        job.post(MemberStarted(member_id=member, node_id=node, pid=100 + member))
        job.post(WorkerHello(member_id=member, generation=job.generation, rank=member - 1, pid=100 + member))
    job.open(0)
    for member in job.members:
        job.post(StepReached(member_id=member, generation=job.generation, step=1))
    still = stalled(job)
    job.post(msgspec.structs.replace(still, node_id=nodes[0]))
    assert job.sent(CollectEvidence) == [], "the other node may be busy"
    job.post(msgspec.structs.replace(still, node_id=nodes[1]))
    assert [g.node_id for g in job.sent(CollectEvidence)] == nodes
    found = evidence(job, job.sent(CollectEvidence)[0].number, phase="forward")
    job.post(msgspec.structs.replace(found, node_id=nodes[0], ranks=found.ranks[:1]))
    assert job.sent(KillMember) == [], "half of the evidence names no rank"
    job.post(msgspec.structs.replace(found, node_id=nodes[1], ranks=found.ranks[1:]))
    assert [(k.node_id, k.member_id) for k in job.sent(KillMember)] == [(nodes[1], job.members[1])]


def test_the_same_hang_at_the_same_step_twice_is_a_bug_of_the_script() -> None:
    for odd, stops in ({"phase": "forward"}, True), ({"process": "T"}, False):
        job = Job().up()
        for attempt in range(2):
            job.post(stalled(job))
            job.post(evidence(job, job.sent(CollectEvidence)[0].number, **odd))
            job.exit(1)
            for rank in (0, 2):
                job.settle(rank, "aborted", 5)
            if attempt == 0:
                job.seal(job.sent(Settle)[0])
                for rank in (0, 2):
                    job.exit(rank, code=78)
                job.hello()
                job.open(5)
                for member in job.members:
                    job.post(StepReached(member_id=member, generation=job.generation, step=6))
        verdict = job.record("verdict")
        assert (verdict["action"] == "stop_user_bug") is stops
        assert ("the same hang at step 5 twice" in verdict["reason"]) is stops


def test_what_an_agent_said_before_its_successor_came_is_no_stall_any_more() -> None:
    """Regression: a stall that a dead agent had reported was never taken back by its successor.

    With the report of one other node, the job then seemed to make no progress. A rank within its own bound could be
    blamed.
    """
    job = Job(world_size=2, nnodes=2)
    nodes = [NodeId("a"), NodeId("b")]
    for node in nodes:
        job.post(AgentHello(node_id=node, slots=1, pid=1))
    still = stalled(job)
    job.now = 100.0
    job.open(0)
    job.post(msgspec.structs.replace(still, node_id=nodes[0]))
    here = MemberSeen(job.members[0], job.generation, 0, 101, "ready", 0)
    job.post(AgentHello(node_id=nodes[0], slots=1, pid=2, members=(here,)))
    job.post(msgspec.structs.replace(still, node_id=nodes[1]))
    assert not job.sent(CollectEvidence)
    job.post(msgspec.structs.replace(still, node_id=nodes[0]))
    assert len(job.sent(CollectEvidence)) == 2
