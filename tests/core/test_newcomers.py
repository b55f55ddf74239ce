"""Newcomers in the seats of lost ranks: the replaced rank, its new process, and the death of a newcomer."""

from __future__ import annotations

import pytest

from holdfast.core.protocol.layout_messages import Layouts
from holdfast.core.protocol.messages import (
    AgentBeat,
    AgentHello,
    Fence,
    JoinAsked,
    KillMember,
    MemberExited,
    MemberStarted,
    Receive,
    Send,
    SessionOpened,
    SetTimer,
    Settle,
    Settled,
    StartMembers,
    StateOffered,
    StateRefused,
    Tick,
    WorkerHello,
)
from tests.core.test_controller import NODE, Job, seen, successor


def at_work(ranks: int) -> Job:
    """Return a job at step 0 whose sessions can be recovered in place."""
    job = Job(ranks)
    job.post(AgentHello(node_id=NODE, slots=ranks, pid=1))
    job.hello()
    job.open(0, live=True)
    return job


def with_a_newcomer() -> Job:
    """Return a job of three ranks that lost rank 1 in step 5 and replaces it."""
    job = at_work(3)
    job.exit(1)
    job.settle(0, "aborted", 5)
    job.settle(2, "aborted", 5)
    return job


def test_a_torn_rank_gives_its_seat_to_a_newcomer() -> None:
    job = at_work(4)
    job.exit(1, "updating", 5)
    job.settle(0, "torn", 5)
    job.settle(2, "ready", 6)
    job.settle(3, "ready", 6)
    assert [k.member_id for k in job.sent(KillMember)] == [job.members[0]]
    assert not [r for r in job.records if r.kind == "verdict"], "its end is waited for"
    job.exit(0, "torn", 5)
    assert (job.record("verdict")["action"], job.record("planned")["step"]) == ("replace", 6)
    assert job.record("members_replaced")["ranks"] == [0, 1]
    assert {(o.step, o.then) for o in job.sent(Settle)} == {(6, "replace")}
    assert [r.data["rank"] for r in job.records if r.kind == "detected"] == [1], (
        "its end is no fault of its own"
    )


def test_a_torn_rank_that_has_left_its_loop_is_replaced_too() -> None:
    """An exception of the script has broken the rank's update. Reports of the removed process no longer count."""
    job = at_work(4)
    job.exit(1, "updating", 5)
    job.settle(0, "torn", 5, away=True)
    job.settle(2, "ready", 6)
    job.settle(3, "ready", 6)
    job.exit(0, "torn", 5)
    assert (job.record("verdict")["action"], job.record("planned")["step"]) == ("replace", 6)


def test_a_newcomer_that_dies_is_followed_by_another_and_nobody_is_fenced_again() -> None:
    job = with_a_newcomer()
    generation, first = job.generation, job.members[1]
    job.exit(1, "starting", 0)
    second = job.members[1]
    assert second > first and job.generation == generation and not job.sent(Fence)
    assert [(o.join, [a.rank for a in o.members]) for o in job.sent(StartMembers)] == [(True, [1])]
    job.exit(1, "starting", 0)
    assert job.generation > generation, "two in a row: something else is wrong, the next rung is tried"
    job.settle(0, "aborted", 5)
    job.settle(2, "aborted", 5)
    assert job.record("verdict")["action"] == "restart_last_gasp"


def test_a_survivor_that_does_not_give_its_state_is_killed_not_the_newcomer() -> None:
    """Regression: a survivor was stopped after it had settled.

    Newcomers waited for it one after the other, 120 s each.
    """
    job = with_a_newcomer()
    offer = StateOffered(member_id=job.members[0], generation=job.generation, step=5, host="h", port=1)
    job.post(offer)
    assert "offer" in [c.name for c in job.log if isinstance(c, SetTimer)]
    job.post(Tick(name="offer"), after_s=15.0)
    assert [k.member_id for k in job.sent(KillMember)] == [job.members[2]]
    generation = job.generation
    job.exit(2, "aborted", 5)
    assert job.generation > generation


def has_state(job: Job, rank: int, step: int) -> None:
    """Let a newcomer take its state and open its session, without a join."""
    member, generation = job.members[rank], job.generation
    job.post(MemberStarted(member_id=member, node_id=NODE, pid=200))
    job.post(WorkerHello(member_id=member, generation=generation, rank=rank, pid=200))
    job.post(SessionOpened(member_id=member, generation=generation, step=step, root="/ck", live=True))


def test_a_newcomer_that_has_its_state_is_fenced_and_not_killed() -> None:
    """Regression: the only other holder was lost during a newcomer's rehearsal.

    The newcomer was killed, with all steps.
    """
    job = at_work(2)
    job.exit(1)
    job.settle(0, "aborted", 5)
    has_state(job, 1, 5)
    job.exit(0)
    assert [fence.member_id for fence in job.sent(Fence)] == [job.members[1]] and not job.sent(KillMember)
    job.settle(1, "aborted", 5)
    verdict, planned = job.record("verdict"), job.record("planned")
    assert (verdict["action"], planned["step"], planned["sources"]) == ("replace", 5, [1])


def test_a_newcomer_without_its_state_is_killed_at_the_next_fence() -> None:
    job = with_a_newcomer()
    job.exit(0)
    assert job.members[1] in [kill.member_id for kill in job.sent(KillMember)]


@pytest.mark.parametrize("lost", [0, 1])
def test_a_successor_knows_the_newcomers_and_what_those_before_them_left(lost: int) -> None:
    """Regression: a new controller killed the newcomer as one of an older generation, and decided before its end."""
    job = at_work(2)
    first = job.members[1]
    job.exit(1, "updating", 4)
    job.settle(0, "ready", 5)
    has_state(job, 1, 5)
    second = successor(job, world_size=2)
    assert second.members == job.members
    living = tuple(m for m in seen(job) if m.rank != lost)
    second.post(AgentHello(node_id=NODE, slots=2, pid=1, members=living))
    assert not second.sent(KillMember)
    page = MemberExited(
        member_id=first, node_id=NODE, generation=second.past.seated, code=None, signal=9,
        state="updating", step=4, detail="update", locals={5: b"at 5"},
    )  # fmt: skip
    second.post(page)
    second.open(5, live=True)
    second.exit(lost, "ready", 5)
    second.post(AgentBeat(node_id=NODE))
    second.settle(1 - lost, "ready", 5)
    verdict, planned = second.record("verdict"), second.record("planned")
    assert (verdict["action"], planned["step"], planned["sources"]) == ("replace", 5, [1 - lost])
    left = second.controller.recovery.replacement.reports()
    assert (1, "updating", 4) in [(r.rank, r.state, r.step) for r in left], "evidence of its seat"


def test_when_all_are_torn_nobody_is_killed() -> None:
    job = at_work(2)
    job.exit(1, "updating", 5)
    job.settle(0, "torn", 5)
    assert job.record("verdict")["action"] == "restart_fresh"
    assert not [c for c in job.log if isinstance(c, Send) and isinstance(c.message, KillMember)]


def test_a_decision_asks_the_planner_once() -> None:
    """The planner looks at the layouts of all ranks: in a large job, this is the longest part of a decision."""
    job = at_work(3)
    asked: list[tuple[int, ...]] = []

    def counting(layouts: Layouts, sources: tuple[int, ...]) -> str:
        asked.append(sources)
        return ""

    job.controller.job.uncovered = counting
    job.exit(1)
    job.settle(0, "aborted", 5)
    job.settle(2, "aborted", 5)
    assert job.record("verdict")["action"] == "replace" and asked == [(0, 2)]


@pytest.mark.parametrize("known", [True, False])
def test_a_rank_whose_layout_is_lost_is_not_replaced_from_memory(known: bool) -> None:
    """Agent and controller died with the rank, before the rank had published its layout again.

    No newcomer can learn it.
    """
    job = Job(2)
    job.controller.job.uncovered = lambda layouts, sources: (
        "" if len(sources) == 2 else "rank 1 alone held a box"
    )
    job.post(AgentHello(node_id=NODE, slots=2, pid=1))
    job.hello()
    job.open(0, live=True)
    if not known:
        del job.controller.job.roster.layouts[1]
    job.exit(1, signal=9, kept=(5,))
    settled = Settled(
        member_id=job.members[0], generation=job.generation, state="aborted", step=5, kept=(5,), rewind=0
    )
    job.post(settled)
    verdict = job.record("verdict")
    if not known:
        assert verdict["action"] == "restart_from_memory"
        assert "rank 1 published no layout" in str(verdict["evidence"])
        return
    assert verdict["action"] == "replace_from_memory"
    for rank in (0, 1):
        offer = StateOffered(member_id=job.members[0], generation=job.generation, step=5, host="h", port=1)
        job.post(JoinAsked(member_id=job.members[1], generation=job.generation) if rank else offer)
    assert [order.kept for order in job.sent(Receive)] == [True]


def test_a_newcomer_that_cannot_go_on_from_its_place_is_no_reason_to_run_the_step_again() -> None:
    """Regression: the newcomer was kept with its state, and all ranks had to run a step that it never reached."""
    job = with_a_newcomer()
    has_state(job, 1, 5)
    newcomer, generation = job.members[1], job.generation
    job.post(
        StateRefused(member_id=newcomer, generation=generation, step=5, reason="it is alone", alone=True)
    )
    assert job.sent(Fence) and not job.sent(KillMember)
    job.settle(0, "aborted", 5)
    job.settle(2, "aborted", 5)
    job.settle(1, "ready", 5, away=True)
    assert job.record("verdict")["action"] == "restart_last_gasp"
    assert job.record("planned")["sources"] == [0, 1, 2]
