"""One node gets a request to leave while others stay, or a job of several nodes gets it as a whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from holdfast.core.ids import NodeId, SaveId
from holdfast.core.job.log_replay import ReplayedState
from holdfast.core.protocol.messages import (
    AgentGone,
    AgentHello,
    CancelTimer,
    EndRun,
    ExitAsked,
    ExitCancelled,
    ExitRun,
    FaultSeen,
    Fence,
    HeldStates,
    JoinAsked,
    Joined,
    KillMember,
    MemberExited,
    MemberSeen,
    MemberStarted,
    Message,
    Receive,
    ResumeInPlace,
    SaveReported,
    Send,
    Settled,
    StartMembers,
    StateOffered,
    StepReached,
    Tick,
    WorkerHello,
)
from holdfast.core.protocol.notices import (
    HoldOrder,
    HoldOver,
    HoldReached,
    Notice,
    NoticeOver,
    PrepareSeats,
    SeatsPrepared,
)
from holdfast.exit_codes import Exit
from tests.core.test_controller import Job
from tests.core.test_nodes import A, B, C, rolled, started


def ask(job: Job, *nodes: NodeId, source: str = "SIGTERM") -> None:
    """Send a signal to the launchers of these nodes."""
    for node in nodes:
        job.post(ExitRun(grace_s=30.0, source=source, node_id=node))


def trains(job: Job, step: int) -> None:
    """Let all ranks commit this step."""
    for member in job.members:
        job.post(StepReached(member_id=member, generation=job.generation, step=step))


def kinds(job: Job) -> set[str]:
    """Return the kinds of all records."""
    return {record.kind for record in job.records}


def ends(job: Job) -> dict[str, EndRun]:
    """Return the agents that were ordered to end, with their orders."""
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
    job.post(AgentHello(node_id=node, slots=1, pid=9, host="h", port=7))  # this agent was started again
    assert not job.controller.job.leaving and rolled(job)[-1] == (A, B, C)


def test_a_spare_that_is_asked_leaves_and_disturbs_no_rank() -> None:
    job = started()
    ask(job, C)
    job.post(Tick(name="depart"), 5.0)
    assert set(ends(job)) == {f"agent:{C}"} and not {"member_lost", "fenced"} & kinds(job)


def test_a_job_whose_launchers_are_all_asked_leaves_as_a_whole_at_once() -> None:
    """After the second request too few nodes would remain, so the job does not wait for the third one."""
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
    """With ``--shrink-to``, one of three nodes departs. Of two nodes none departs, since one node is no majority."""
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
    """Regression: the ranks of the node returned to the newest checkpoint, though there was time to save."""
    job = started()
    job.hello()
    job.open(20)
    job.controller.job.uncovered = lambda layouts, sources: "" if 1 in sources else "shard 1 is gone"
    if in_memory:
        job.post(HeldStates(node_id=C, ranks={"1": (20,)}))
    trains(job, 21)
    ask(job, B)
    job.post(Tick(name="depart"), 5.0)
    assert ("node_left" in kinds(job)) is in_memory and ("exit_requested" in kinds(job)) is not in_memory


def training() -> Job:
    """Return a job with two training ranks on A and B, with live sessions; C waits."""
    job = started()
    job.hello()
    job.open(20, live=True)
    trains(job, 21)
    return job


def notice(job: Job, node: NodeId, left_s: float = -1.0, source: str = "holdfast drain", **how: bool) -> None:
    """Report that the node will leave."""
    job.post(Notice(node_id=node, source=source, left_s=left_s, **how))


def prepared(job: Job, node: NodeId = C, *ranks: int, failed: str = "") -> None:
    """Report that an agent has built the requested processes."""
    job.post(SeatsPrepared(node_id=node, ranks=ranks or (1,), failed=failed))


def reach_hold(job: Job, step: int = 25) -> None:
    """Report that all ranks have stopped at a step."""
    job.post(HoldReached(member_id=job.members[0], generation=job.generation, step=step))


def orders(job: Job, kind: type[Message]) -> list[Any]:
    """Return all orders of a kind that were sent so far."""
    return [c.message for c in job.log if isinstance(c, Send) and isinstance(c.message, kind)]


def move(job: Job) -> None:
    """Run the recovery that puts a newcomer on C into the seat of rank 1."""
    old = job.members[1]
    assert [k.member_id for k in job.sent(KillMember)] == [old]
    generation = job.generation
    end = MemberExited(
        member_id=old, node_id=B, generation=generation, code=None, signal=9, state="ready", step=25,
        detail="ready",
    )  # fmt: skip
    job.post(Settled(member_id=job.members[0], generation=generation, state="ready", step=25))
    job.post(end)
    (order,) = job.sent(StartMembers)
    assert order.node_id == C and order.join
    new, first = order.members[0].member_id, job.members[0]
    job.post(MemberStarted(member_id=new, node_id=C, pid=7))
    job.post(WorkerHello(member_id=new, generation=generation, rank=1, pid=7))
    job.post(StateOffered(member_id=first, generation=generation, step=25, host="h", port=1))
    job.post(JoinAsked(member_id=new, generation=generation))
    assert job.sent(Receive)
    job.post(Joined(member_id=new, generation=generation, step=25))
    assert job.sent(ResumeInPlace)
    trains(job, 26)


def test_a_rank_moves_to_a_process_that_was_built_beforehand_at_the_end_of_a_step() -> None:
    job = training()
    notice(job, B)
    (order,) = job.sent(PrepareSeats)
    assert (order.node_id, [seat.rank for seat in order.members]) == (C, [1])
    job.post(Tick(name="depart"), 60.0)
    assert not {"fenced", "holding"} & kinds(job), "the old rank trains until the new one is built"
    prepared(job)
    assert job.sent(HoldOrder) and not job.sent(Fence)
    reach_hold(job)
    assert job.record("detected")["kind"] == "leave" and job.sent(Fence)
    move(job)
    assert job.record("verdict")["rung"] == "node" and job.record("verdict")["counts"] is False
    assert job.record("recovered")["steps_lost"] == 0
    assert "node_left" not in kinds(job), "an agent that may run the controller stays until the job continues"
    job.post(Tick(name="depart"), 0.25)
    assert set(ends(job)) == {f"agent:{B}"} and ends(job)[f"agent:{B}"].node_only
    assert NoticeOver(node_id=B) in orders(job, NoticeOver)
    assert not job.controller.job.leaving


def test_moves_do_not_use_up_the_budget_of_restarts() -> None:
    job = training()
    notice(job, B)
    prepared(job)
    reach_hold(job)
    move(job)
    assert job.controller.job.answered == []


def test_a_notice_that_is_withdrawn_leaves_no_trace() -> None:
    job = training()
    notice(job, B)
    notice(job, B, withdrawn=True)
    assert [order.members for order in orders(job, PrepareSeats)][-1] == ()
    assert "node_stays" in kinds(job) and not job.controller.job.leaving
    prepared(job)
    job.post(Tick(name="depart"), 60.0)
    assert not {"fenced", "holding", "node_left"} & kinds(job)


def asked_to_stop() -> Job:
    """Return a job whose ranks are asked to stop, because B leaves. C has a prepared process."""
    job = training()
    notice(job, B)
    prepared(job)
    assert job.sent(HoldOrder)
    return job


def continues(job: Job, step: int = 25) -> bool:
    """Return whether exactly the last event has ordered every living rank to continue, and has fenced none."""
    ordered = {(order.member_id, order.generation, order.step) for order in job.sent(HoldOver)}
    living = [member.member_id for member in job.controller.job.roster.living]
    return ordered == {(member, job.generation, step) for member in living} and not job.sent(Fence)


def withdraw(job: Job) -> None:
    """Withdraw the notice."""
    notice(job, B, withdrawn=True)


def ask_by_a_rank(job: Job) -> None:
    """Let a rank ask for the exit of the job."""
    job.post(ExitAsked(member_id=job.members[0], generation=job.generation, source="SIGUSR1"))


def ask_by_a_person(job: Job) -> None:
    """Let a person ask for the exit of the job."""
    job.post(ExitRun(grace_s=30.0, source="Ctrl-C"))


def lose_the_spare(job: Job) -> None:
    """Lose the node that has the prepared process. No node has room for the rank then."""
    job.controller.job.liveness.leave(C)
    job.post(AgentGone(node_id=C))


def ask_a_launcher(job: Job) -> None:
    """Ask the launcher of the node too. Other launchers may be asked in the next seconds, so the move waits."""
    ask(job, B)


GIVEN_UP = (withdraw, ask_by_a_rank, ask_by_a_person, lose_the_spare, ask_a_launcher)


@pytest.mark.parametrize("give_up", GIVEN_UP)
def test_ranks_that_stop_for_a_move_that_is_given_up_continue_at_once(give_up: Callable[[Job], None]) -> None:
    """Regression: all ranks stood still until the limit of 5 s."""
    job = asked_to_stop()
    give_up(job)
    assert not job.sent(Fence) and not orders(job, HoldOver), "the ranks may not have stopped yet"
    reach_hold(job)
    assert continues(job)
    job.post(Tick(name="depart"), 0.25)
    assert "fenced" not in kinds(job)


def test_a_second_notice_right_after_the_first_stops_the_ranks_once_more() -> None:
    """The first stop is over when the second move is prepared, so it does not count for it."""
    job = asked_to_stop()
    withdraw(job)
    notice(job, B)
    reach_hold(job)
    assert continues(job)
    prepared(job)
    assert job.sent(HoldOrder)
    reach_hold(job)  # repeated by an agent that has connected again
    assert not job.sent(Fence) and not job.sent(HoldOver)
    reach_hold(job, 26)
    assert job.sent(Fence) and not job.sent(HoldOver)


def test_a_stop_that_the_first_notice_caused_serves_the_second_one() -> None:
    """No rank continues before it is ordered to. So it does not matter which of two orders has caused the stop."""
    job = asked_to_stop()
    withdraw(job)
    notice(job, B)
    prepared(job)
    reach_hold(job)
    assert job.sent(Fence) and not job.sent(HoldOver)


def test_a_move_that_is_put_off_stops_the_ranks_again_later() -> None:
    job = asked_to_stop()
    ask_a_launcher(job)
    reach_hold(job)
    assert continues(job)
    job.post(Tick(name="depart"), 6.0)
    assert job.sent(HoldOrder)
    reach_hold(job, 80)
    assert job.sent(Fence)


def test_a_rank_that_connects_again_is_ordered_again_to_continue() -> None:
    job = asked_to_stop()
    withdraw(job)
    hello = WorkerHello(member_id=job.members[1], generation=job.generation, rank=1, pid=7)
    job.post(hello)
    assert not job.sent(HoldOver)
    reach_hold(job)
    job.post(hello)
    assert [(order.member_id, order.step) for order in job.sent(HoldOver)] == [(job.members[1], 25)]
    old = HoldReached(member_id=job.members[0], generation=job.generation, step=25)
    job.post(FaultSeen(member_id=job.members[0], generation=job.generation, step=25, what="broke"))
    job.post(Tick(name="grace"), 1.0)
    assert job.sent(Fence)
    job.post(hello)
    assert not job.sent(HoldOver), "the fence has ended every stop"
    job.post(old)
    assert not job.sent(HoldOver)


def test_the_next_controller_ends_a_stop_that_it_has_not_ordered() -> None:
    """The agents report the stop again. The controller orders all ranks to continue, also those that connect later."""
    job = asked_to_stop()
    second = Job(world_size=2, nnodes=2, voters=(A, B, C), term=2, past=ReplayedState.read(job.records))
    second.now = job.now
    for node, rank in ((A, 0), (B, 1), (C, -1)):
        seen = [MemberSeen(job.members[rank], job.generation, rank, 7, "ready", 25)] if rank >= 0 else []
        second.post(AgentHello(node_id=node, slots=1, pid=1, members=tuple(seen), host="h", port=7))
        if rank >= 0:
            second.post(WorkerHello(member_id=job.members[rank], generation=job.generation, rank=rank, pid=7))
        if rank == 0:
            reach_hold(second)
            assert continues(second)
    assert [order.member_id for order in orders(second, HoldOver)].count(job.members[1]) == 2
    assert "fenced" not in kinds(second)


def test_ranks_are_not_asked_to_stop_before_their_processes_are_ordered() -> None:
    """Regression: a notice in the last moments of a recovery stopped all ranks until the processes were built."""
    job = started()
    job.hello()
    job.open(20, live=True)
    notice(job, B)
    assert not orders(job, PrepareSeats), "the job has not resumed"
    trains(job, 21)
    job.post(Tick(name="depart"), 0.25)
    assert job.sent(PrepareSeats) and not orders(job, HoldOrder)
    prepared(job)
    assert job.sent(HoldOrder)


def test_ranks_are_not_asked_to_stop_before_the_processes_for_their_new_places_are_built() -> None:
    """Regression: the processes of the former places counted."""
    job = training()
    notice(job, B)
    job.post(FaultSeen(member_id=job.members[0], generation=job.generation, step=21, what="broke"))
    prepared(job)
    assert "move_prepared" in kinds(job) and not orders(job, HoldOrder)
    job.post(Tick(name="grace"), 1.0)
    for member in job.members:
        job.post(Settled(member_id=member, generation=job.generation, state="ready", step=21))
    trains(job, 22)
    job.post(Tick(name="depart"), 0.25)
    assert [order.generation for order in job.sent(PrepareSeats)] == [job.generation]
    assert not orders(job, HoldOrder)
    prepared(job)
    assert job.sent(HoldOrder)


def test_a_node_leaves_while_one_of_its_notices_stands() -> None:
    job = training()
    notice(job, B, source="file")
    notice(job, B)
    notice(job, B, withdrawn=True)
    prepared(job)
    assert orders(job, HoldOrder)


def test_a_process_that_cannot_be_built_does_not_keep_the_node() -> None:
    job = training()
    notice(job, B)
    prepared(job, failed="ValueError: no")
    reach_hold(job)
    assert job.sent(Fence)


def test_ranks_that_do_not_stop_are_not_waited_for_beyond_the_deadline() -> None:
    """A step takes for ever. The move to the new node comes in the middle of the step, which is run again."""
    job = training()
    notice(job, B, left_s=8.0)
    prepared(job)
    job.post(Tick(name="depart"), 6.0)
    assert not job.sent(Fence)
    job.post(Tick(name="depart"), 1.5)
    assert job.sent(Fence) or "node_left" in kinds(job)


def test_without_a_spare_the_job_waits_for_one_until_it_has_to_save() -> None:
    job = Job(world_size=2, nnodes=2, voters=(A, B))
    for node in (A, B):
        job.post(AgentHello(node_id=node, slots=1, pid=1, host="h", port=7))
    job.hello()
    job.open(20, live=True)
    trains(job, 21)
    notice(job, B, left_s=100.0)
    assert not {"exit_requested", "fenced"} & kinds(job) and not job.controller.job.leaving
    job.post(Tick(name="depart"), 80.0)
    assert "exit_requested" not in kinds(job)
    job.post(Tick(name="depart"), 6.0)
    assert job.record("exit_requested")["grace_s"] == pytest.approx(14.0, abs=0.2)


def test_a_spare_that_comes_in_time_takes_the_ranks() -> None:
    job = Job(world_size=2, nnodes=2, voters=(A, B))
    for node in (A, B):
        job.post(AgentHello(node_id=node, slots=1, pid=1, host="h", port=7))
    job.hello()
    job.open(20, live=True)
    trains(job, 21)
    notice(job, B, left_s=1000.0)
    job.controller.job.liveness.voters = (A, B, C)
    job.post(AgentHello(node_id=C, slots=1, pid=1, host="h", port=7), 5.0)
    assert orders(job, PrepareSeats)


def test_the_end_of_the_whole_job_is_met_with_a_save() -> None:
    """A scheduler has set the end time, and spare nodes cannot avoid it."""
    job = training()
    notice(job, NodeId(""), left_s=3600.0, source="slurm")
    job.post(Tick(name="depart"), 3500.0)
    assert not {"exit_requested", "fenced"} & kinds(job)
    job.post(Tick(name="depart"), 90.0)
    assert job.record("exit_requested")["source"] == "slurm"


def test_a_save_that_has_taken_long_is_begun_earlier() -> None:
    job = training()
    save = SaveId("run", job.generation, 21, 0, "periodic")
    job.post(
        SaveReported(
            member_id=job.members[0], generation=job.generation, save_id=save, sealed=False, size_bytes=1,
            duration_s=100.0,
        )
    )  # fmt: skip
    notice(job, NodeId(""), left_s=600.0)
    job.post(Tick(name="depart"), 350.0)
    assert "exit_requested" not in kinds(job)
    job.post(Tick(name="depart"), 60.0)
    assert "exit_requested" in kinds(job)


def test_ranks_are_placed_as_usual_while_a_notice_only_waits() -> None:
    """If there is no room elsewhere, a lost rank comes back on its own node, despite the notice."""
    job = Job(world_size=2, nnodes=2, voters=(A, B))
    for node in (A, B):
        job.post(AgentHello(node_id=node, slots=1, pid=1, host="h", port=7))
    job.hello()
    job.open(20, live=True)
    trains(job, 21)
    notice(job, B, left_s=1000.0)
    assert job.controller.job.places([job.controller.job.roster.members[1]]) == {1: (B, 0)}


def test_a_node_that_has_left_and_come_back_is_asked_again() -> None:
    """After its return the node is a member like any other: its first departure does not delay the second one."""
    job = started()
    ask(job, C)
    job.post(Tick(name="depart"), 5.0)
    job.post(AgentHello(node_id=C, slots=1, pid=9, host="h", port=7))
    ask(job, A, B, C)
    assert job.record("exit_requested")["source"] == "SIGTERM"


@pytest.mark.parametrize("left_s", [-1.0, 20.0])
def test_fewer_nodes_go_on_where_they_may_before_the_deadline(left_s: float) -> None:
    """The three nodes run with ``--shrink-to``, and none of them is a spare."""
    nodes = (A, B, C)
    job = Job(world_size=3, nnodes=3, nodes_min=1, voters=nodes)
    for node in nodes:
        job.post(AgentHello(node_id=node, slots=1, pid=1, host="h", port=7))
    job.hello()
    job.open(20, live=True)
    trains(job, 21)
    notice(job, B, left_s=left_s)
    assert bool(orders(job, HoldOrder)) is (left_s < 0), "a spare may come by then"
    if left_s > 0:
        job.post(Tick(name="depart"), 16.0)
    reach_hold(job)
    old, generation = job.members[1], job.generation
    assert [k.member_id for k in job.sent(KillMember)] == [old]
    for index in (0, 2):
        job.post(Settled(member_id=job.members[index], generation=generation, state="ready", step=25))
    job.post(
        MemberExited(
            member_id=old, node_id=B, generation=generation, code=None, signal=9, state="ready", step=25,
            detail="ready",
        )
    )  # fmt: skip
    assert job.record("verdict")["rung"] == "shrink"
