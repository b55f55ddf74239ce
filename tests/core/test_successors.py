"""A controller that takes over in the middle of a recovery: earlier decisions stay valid, and no rank is left out."""

from __future__ import annotations

from holdfast.core.ids import NO_GENERATION, Generation, LayoutVersion, MemberId, NodeId
from holdfast.core.protocol.layout_messages import Layout
from holdfast.core.protocol.messages import (
    AgentBeat,
    AgentGone,
    AgentHello,
    FaultSeen,
    Fence,
    Joined,
    KillMember,
    LayoutPublished,
    Leave,
    MemberExited,
    MemberSeen,
    MemberStarted,
    ResumeInPlace,
    SessionOpened,
    Settle,
    StartMembers,
    StateOffered,
    StepReached,
    Tick,
    WorkerHello,
)
from holdfast.exit_codes import Exit
from tests.core.test_controller import NODE, Job, seen, successor
from tests.core.test_fallen import gone_back, live, raises, says
from tests.core.test_newcomers import at_work
from tests.core.test_nodes import A, B, C, beat, past_of, smaller

NODES = (A, B, C)


def test_an_end_that_was_decided_is_carried_out_by_the_next_controller() -> None:
    """Regression: ranks that had not raised exited as ordered; the next controller took the exit codes for crashes."""
    job = live()
    raises(job, 0, user_error=True)
    for rank in range(3):
        says(job, rank, "aborted", away=rank == 0)
    job.exit(0, "aborted", code=int(Exit.BAD_INPUT))
    assert job.record("verdict")["action"] == "stop_bad_input"
    job.seal(job.sent(Settle)[0])
    assert {leave.code for leave in job.sent(Leave)} == {Exit.BAD_INPUT}
    second = successor(job)
    second.post(AgentHello(node_id=NODE, slots=3, pid=1))
    for rank in (1, 2):
        second.exit(rank, "aborted", code=int(Exit.BAD_INPUT))
    second.exit(0, "aborted", code=int(Exit.BAD_INPUT))
    second.post(AgentBeat(node_id=NODE))
    assert not any(r.kind == "generation_started" for r in second.records)
    assert second.outcome().code == Exit.BAD_INPUT and second.outcome().reason == "ValueError: nan"


def test_an_end_that_was_decided_saves_under_the_next_controller() -> None:
    job = live(2)
    for rank in range(2):
        raises(job, rank, user_error=True)
    for rank in range(2):
        says(job, rank, "aborted", away=True)
    second = successor(job, world_size=2)
    second.post(AgentHello(node_id=NODE, slots=2, pid=1, members=seen(job)))
    second.open(0, live=True)
    second.post(AgentBeat(node_id=NODE))
    for rank in range(2):
        says(second, rank, "aborted", away=True)
    verdict = second.record("verdict")
    assert (verdict["action"], verdict["evidence"]) == (
        "stop_bad_input",
        ["rank 0 at step 5: ValueError: nan"],
    )
    assert [order.save is not None for order in second.sent(Settle)] == [True, True]


def test_all_that_died_without_a_controller_are_one_fault() -> None:
    """Regression: the new controller restarted all ranks for the first death, and ended that start for the next."""
    job = Job().up(3)
    second = successor(job)
    second.post(AgentHello(node_id=NODE, slots=3, pid=1))
    for rank in range(3):
        second.exit(rank, "compute", 5)
    second.post(AgentBeat(node_id=NODE))
    assert len(second.sent(StartMembers)) == 1 and not second.sent(Fence)
    assert [r.data["rank"] for r in second.records if r.kind == "detected"] == [0, 1, 2]
    assert len(second.controller.job.answered) == 1, "one of the budget"
    assert second.controller.recovery.phase == "starting"


def test_a_step_that_all_go_back_to_is_told_by_the_next_controller() -> None:
    job = gone_back()
    second = successor(job)
    here = tuple(
        MemberSeen(m, job.controller.job.roster.generation, rank, 100 + m, "aborted", 105)
        for rank, m in enumerate(job.members)
    )
    second.post(AgentHello(node_id=NODE, slots=3, pid=1, members=here))
    second.post(AgentBeat(node_id=NODE))
    assert {(order.generation, order.step) for order in second.sent(ResumeInPlace)} == {(job.generation, 100)}


def taken_over() -> Job:
    """Return the next controller of three nodes with one rank each, at step 6. No node has connected so far."""
    return Job(world_size=3, nnodes=3, voters=NODES, term=2, past=past_of(smaller(0, nodes=3, per_node=1)))


def come(job: Job, node: NodeId, *, died: bool = False) -> None:
    """Connect the agent of a node, with its report on its rank. The agent's list of members stays incomplete."""
    rank = NODES.index(node)
    here = MemberSeen(MemberId(rank + 1), Generation(1, 1), rank, 102, "ready", 6)
    job.post(AgentHello(node_id=node, slots=1, pid=1, members=() if died else (here,), host=node, port=7))
    if died:
        exited = MemberExited(
            member_id=here.member_id, node_id=node, generation=here.generation, code=None, signal=9,
            state="compute", step=6,
        )  # fmt: skip
        job.post(exited)


def test_a_node_that_is_lost_before_its_list_is_closed_is_not_waited_for() -> None:
    """Regression: the other nodes were neither judged nor reminded; the run ended as an internal error after 120 s."""
    job = taken_over()
    for node in NODES:
        come(job, node)
    for node in (A, B):
        job.post(AgentBeat(node_id=node))
    job.post(AgentGone(node_id=C))
    job.post(Tick(name="rejoin"), 2.0)
    assert job.controller.job.roster.adopting, "it may be back in a moment"
    for _ in range(25):
        beat(job, {A, B})
    assert job.record("adopted")["dead"] == [2] and job.record("fenced")["dead_ranks"] == [2]


def test_who_comes_after_the_fence_hears_of_it() -> None:
    """Regression: a node that connected after the fence did not get it, and its silent rank was killed."""
    job = taken_over()
    come(job, A)
    job.post(FaultSeen(member_id=MemberId(1), generation=Generation(1, 1), step=6, what="reset"))
    job.post(AgentBeat(node_id=A))
    job.post(Tick(name="grace"), 0.3)
    come(job, B, died=True)
    job.post(AgentBeat(node_id=B))
    come(job, C)
    job.post(AgentBeat(node_id=C))
    assert [fence.member_id for fence in job.sent(Fence)] == [1, 3]


def test_a_decision_waits_for_the_lists_of_all_agents() -> None:
    """Regression: the members of a decision made before were not in the open list, and were taken for lost."""
    job = taken_over()
    come(job, A)
    job.post(AgentBeat(node_id=A))
    come(job, B, died=True)
    job.post(FaultSeen(member_id=MemberId(1), generation=Generation(1, 1), step=6, what="reset"))
    job.post(Tick(name="grace"), 0.3)
    job.post(Tick(name="rejoin"), 2.0)
    says(job, 0, "aborted", step=6)
    assert [r.data["rank"] for r in job.records if r.kind == "member_exited"] == [1, 2]
    assert not any(r.kind in ("adopted", "planned") for r in job.records), "the list of B is open"
    job.post(AgentBeat(node_id=B))
    assert job.record("adopted")["dead"] == [1, 2] and job.record("planned")["step"] == 6


def test_a_member_that_is_seated_after_a_hello_is_not_missing_in_it() -> None:
    """Regression: it was declared lost by a list from before its start, while its agent was starting it."""
    job = live(2)
    raises(job, 0)
    says(job, 1, "aborted")
    job.post(AgentGone(node_id=NODE))
    job.post(AgentHello(node_id=NODE, slots=2, pid=2))
    job.exit(0, "compute", 5)
    newcomer = job.sent(StartMembers)[-1].members[0].member_id
    job.exit(1, "aborted", 5)  # begins another recovery, which kills the newcomer
    assert [order.member_id for order in job.sent(KillMember)][-1] == newcomer
    job.post(AgentBeat(node_id=NODE))
    assert not [r for r in job.records if r.kind == "member_lost"], "it may still be about to start"


def test_the_layout_of_a_dead_member_counts() -> None:
    """Regression: it arrived after the exit and was dropped, so no rank could save, and all steps were lost."""
    job = live(2)
    job.exit(0, "compute", 5)
    version = LayoutVersion(job.controller.job.roster.generation, 7)
    published = LayoutPublished(
        member_id=MemberId(1), generation=Generation(1, 1), rank=0, version=version, layout=Layout(b"0", b""),
        size_bytes=0,
    )  # fmt: skip
    job.post(published)
    assert job.controller.job.roster.layouts[0].version == version


def joins(job: Job, rank: int, step: int) -> None:
    """Let a replacement take its state and join, and let all ranks commit the next step."""
    member, generation = job.members[rank], job.generation
    for source in range(len(job.members)):
        if source != rank:
            offer = StateOffered(
                member_id=job.members[source], generation=generation, step=step, host="h", port=1
            )
            job.post(offer)
    job.post(MemberStarted(member_id=member, node_id=NODE, pid=200))
    job.post(WorkerHello(member_id=member, generation=generation, rank=rank, pid=200))
    job.post(SessionOpened(member_id=member, generation=generation, step=step, root="/ck", live=True))
    job.post(Joined(member_id=member, generation=generation, step=step))
    for other in job.members:
        job.post(StepReached(member_id=other, generation=job.generation, step=step + 1))


def test_ranks_replaced_in_a_start_keep_their_step_under_the_next_controller() -> None:
    """A rank was lost before all sessions had opened, and another one later. The sessions that the agents repeat to the
    next controller opened at different steps: it took the ranks for restored from different checkpoints."""
    job = at_work(3)
    job.exit(1, "starting", 0)
    restart(job)
    for rank in (0, 2):
        opened = SessionOpened(
            member_id=job.members[rank], generation=job.generation, step=5, root="/ck", live=True
        )
        job.post(opened)
    job.exit(1, "starting", 0)
    for rank in (0, 2):
        job.settle(rank, "ready", 5)
    assert job.record("verdict")["action"] == "replace"
    joins(job, 1, 5)
    job.exit(0, "compute", 9)
    for rank in (1, 2):
        job.settle(rank, "aborted", 9)
    joins(job, 0, 9)
    second = successor(job)
    here = tuple(
        MemberSeen(m, job.generation, rank, 100 + m, "compute", 10) for rank, m in enumerate(job.members)
    )
    second.post(AgentHello(node_id=NODE, slots=3, pid=1, members=here))
    for rank, step in enumerate((9, 5, 5)):
        repeated = SessionOpened(
            member_id=job.members[rank], generation=job.generation, step=step, root="/ck", live=True
        )
        second.post(repeated)
    second.post(AgentBeat(node_id=NODE))
    assert [r.data["what"] for r in second.records if r.kind == "detected"] == []
    assert (second.controller.job.step, second.controller.recovery.phase) == (9, "resuming_in_place")


def restart(job: Job) -> None:
    """Let all ranks save, exit and start again, after rank 1 and its replacements were lost."""
    for rank in (0, 2):
        job.settle(rank, "aborted", 5)
    for _ in range(2):
        job.exit(1, "starting", 0)
    for rank in (0, 2):
        job.settle(rank, "aborted", 5)
    job.seal(job.sent(Settle)[0])
    for rank in (0, 2):
        job.exit(rank, "ready", 5, code=int(Exit.RESTART))
    job.hello()


def test_a_leader_whose_log_lacks_the_start_names_the_steps_that_are_lost() -> None:
    """Regression: the host lost power before its copy of the log was written; the lost steps were not recorded."""
    job = Job(world_size=2, nnodes=2, voters=(A, B), term=2)
    here = tuple(MemberSeen(MemberId(r + 1), Generation(1, 1), r, 102 + r, "updating", 6) for r in range(2))
    job.post(AgentHello(node_id=A, slots=2, pid=1, members=here, host="a", port=7))
    assert job.record("start_forgotten") == {"node": A, "ranks": [0, 1], "step": 7}
    assert [order.member_id for order in job.sent(KillMember)] == [1, 2]
    job.post(AgentHello(node_id=B, slots=2, pid=1, host="b", port=7))
    job.open(3)
    assert job.record("restored")["steps_lost"] == 4


def test_the_last_page_names_the_steps_of_a_process_that_its_agent_has_not_heard() -> None:
    """Regression: the agent had just been started, and its hello said nothing of the steps: none were recorded."""
    job = Job(world_size=2, nnodes=2, voters=(A, B), term=2)
    here = tuple(MemberSeen(MemberId(r + 1), NO_GENERATION, -1, 102 + r, "starting", 0) for r in range(2))
    job.post(AgentHello(node_id=A, slots=2, pid=1, members=here, host="a", port=7))
    assert not [r for r in job.records if r.kind == "start_forgotten"]
    for member_id, step in ((1, 6), (2, 7)):
        exited = MemberExited(
            member_id=MemberId(member_id), node_id=A, generation=Generation(1, 1), code=None, signal=9,
            state="ready", step=step,
        )  # fmt: skip
        job.post(exited)
    assert [r.data["step"] for r in job.records if r.kind == "start_forgotten"] == [6, 7]
    job.post(AgentHello(node_id=B, slots=2, pid=1, host="b", port=7))
    job.open(3)
    assert job.record("restored")["steps_lost"] == 4
