"""Every phase of a recovery ends in a decision. Only a rank without progress is killed because of time."""

from __future__ import annotations

from collections.abc import Callable
from typing import get_args

import pytest

from holdfast.core.decide.recovery_phases import PHASES, RULES, Phase
from holdfast.core.ids import LayoutVersion
from holdfast.core.job.wait_bounds import FAILS_TO, RATE_BYTES_PER_S
from holdfast.core.protocol.health_messages import Active, CollectEvidence, Evidence, RankEvidence, Stalled
from holdfast.core.protocol.layout_messages import Layout
from holdfast.core.protocol.messages import (
    AgentBeat,
    AgentGone,
    AgentHello,
    CancelTimer,
    FaultSeen,
    Fence,
    JoinAsked,
    KillMember,
    LayoutPublished,
    SetTimer,
    Settle,
    StateOffered,
    StepReached,
    StopRun,
    Tick,
)
from tests.core.test_controller import NODE, Job, fail, seen
from tests.core.test_newcomers import at_work, has_state, with_a_newcomer

TICKS_MAX = 40
OF_NODES = ("beat", "roll", "rejoin")
"""Timers of the nodes, which live."""


def fenced() -> Job:
    job = Job().up()
    job.exit(1)
    return job


def in_grace() -> Job:
    job = Job().up()
    job.post(FaultSeen(member_id=job.members[0], generation=job.generation, step=5, what="reset"))
    return job


def retrying() -> Job:
    """Return a job in which rank 2 must apply its update and never completes it."""
    job = in_grace()
    job.post(Tick(name="grace"), after_s=0.3)
    job.settle(0, "ready", 6)
    job.settle(1, "ready", 6)
    job.settle(2, "in_doubt", 5)
    return job


def saving() -> Job:
    job = fenced()
    job.settle(0, "aborted", 5)
    job.settle(2, "aborted", 5)
    return job


def compared(job: Job) -> Job:
    """Return the job with comparison of copies: its sources report only the digests that the test sends."""
    job.config = job.config.__class__(run_id="run", world_size=job.config.world_size, verify=True)
    job.controller.job.config = job.config
    return job


def comparing() -> Job:
    """Both survivors are asked for digests, and send none."""
    job = compared(fenced())
    job.settle(0, "aborted", 5)
    job.settle(2, "aborted", 5)
    return job


def preparing() -> Job:
    """Return a job that compares copies and is to replace rank 1."""
    job = compared(at_work(3))
    job.exit(1)
    job.settle(0, "aborted", 5)
    job.settle(2, "aborted", 5)
    return job


def ending() -> Job:
    """Return a job that a typed error of the script ends, after a save."""
    job = Job().up()
    fail(job, 1, user_error=True)
    job.exit(1, code=66)
    job.settle(0, "aborted", 5)
    job.settle(2, "aborted", 5)
    job.seal(job.sent(Settle)[0])
    return job


def resuming_in_place() -> Job:
    """Return a job whose ranks have all reached the step, so that no rank runs it again."""
    job = retrying()
    job.settle(2, "ready", 6)
    return job


def stopped() -> Job:
    """Return a job that is stopped during a fence: no process ends, and none is started."""
    job = fenced()
    job.post(StopRun(reason="test"))
    return job


def leaving() -> Job:
    job = saving()
    job.seal(job.sent(Settle)[0])
    return job


def starting() -> Job:
    job = Job()
    job.post(AgentHello(node_id=NODE, slots=3, pid=1))
    job.hello()
    return job


def resuming() -> Job:
    job = starting()
    job.open(0)
    return job


def waiting() -> Job:
    """Return a job whose ranks have all exited, on a node without room for any of them."""
    job = leaving()
    job.controller.job.slots[NODE] = 0
    for rank in (0, 2):
        job.exit(rank, "ready", 5, code=75)
    return job


IN_PHASE: dict[Phase, Callable[[], Job]] = {
    "idle": lambda: Job().up(),
    "grace": in_grace,
    "fencing": fenced,
    "retrying": retrying,
    "preparing": preparing,
    "replacing": with_a_newcomer,
    "comparing": comparing,
    "saving": saving,
    "leaving": leaving,
    "ending": ending,
    "waiting": waiting,
    "starting": starting,
    "resuming": resuming,
    "resuming_in_place": resuming_in_place,
    "stopped": stopped,
}


def timers(job: Job) -> dict[str, SetTimer]:
    """Return the running timers by name."""
    found: dict[str, SetTimer] = {}
    for command in job.log:
        if isinstance(command, SetTimer):
            found[command.name] = command
        elif isinstance(command, CancelTimer):
            found.pop(command.name, None)
    return {name: timer for name, timer in found.items() if name not in OF_NODES}


def stands_still(job: Job) -> None:
    """Report that the job makes no progress, with all ranks at one place."""
    generation = job.controller.job.roster.generation
    job.post(
        Stalled(node_id=NODE, generation=generation, idle_s=130.0, bound_s=120.0, step_s=0.1, waiting=True)
    )
    (order,) = job.sent(CollectEvidence)
    ranks = tuple(
        RankEvidence(
            member_id=member, rank=rank, step=5, phase="resuming", idle_s=130.0, bound_s=120.0, process="S"
        )
        for rank, member in enumerate(job.members)
    )
    job.post(Evidence(node_id=NODE, number=order.number, ranks=ranks))


@pytest.mark.parametrize("phase", get_args(Phase))
def test_every_phase_ends_though_no_worker_ever_answers(phase: Phase) -> None:
    """Regression: a job was ordered to run a step again, one rank never came, and no bound ended this."""
    job = IN_PHASE[phase]()
    assert job.controller.recovery.phase == phase
    decisions = len(decided(job))
    due: dict[str, tuple[SetTimer, float]] = {}  # when each timer that runs is over
    for _ in range(TICKS_MAX):
        if len(decided(job)) > decisions:
            return
        if job.controller.recovery.rules.trains:
            stands_still(job)
            continue
        running = timers(job).values()
        assert running, f"nothing ends {job.controller.recovery.phase}"
        for timer in running:
            if due.get(timer.name, (None, 0.0))[0] is not timer:
                due[timer.name] = (timer, job.now + timer.delay_s)
        first = min(running, key=lambda timer: due[timer.name][1])
        job.post(Tick(name=first.name), after_s=max(0.0, due[first.name][1] - job.now))
    raise AssertionError(f"{phase} does not end: {job.controller.snapshot()}")


def decided(job: Job) -> list[str]:
    """Return the decisions so far."""
    return [r.kind for r in job.records if r.kind in ("verdict", "run_ended", "generation_started")]


def test_every_phase_that_waits_is_in_the_table() -> None:
    assert set(RULES) == set(get_args(Phase)) == {phase for phase, _ in PHASES} | set(PHASES.values())
    assert {wait for rules in RULES.values() for wait in rules.waits} == set(FAILS_TO)


def active(job: Job, *ranks: int, stopped: tuple[int, ...] = ()) -> None:
    """Report that these ranks make progress and that some are stopped."""
    moving = tuple(job.members[rank] for rank in ranks)
    job.post(Active(NODE, moving, tuple(job.members[rank] for rank in stopped)))


@pytest.mark.parametrize(
    ("make", "wait", "ranks"),
    [(fenced, "quiesce", (0, 2)), (retrying, "retry", (2,)), (saving, "gasp", (0, 2)),
     (with_a_newcomer, "offer", (0, 2)), (with_a_newcomer, "join", (1,)), (leaving, "leave", (0, 2))],
)  # fmt: skip
def test_one_that_makes_progress_is_waited_for(
    make: Callable[[], Job], wait: str, ranks: tuple[int, ...]
) -> None:
    job = make()
    late = ranks[-1]
    for _ in range(3):
        active(job, *ranks)
        job.post(Tick(name=wait), after_s=130.0)
        assert job.sent(KillMember) == [] and wait in timers(job)
    active(job, *ranks[:-1])
    job.post(Tick(name=wait), after_s=130.0)
    (kill,) = job.sent(KillMember)
    assert kill.member_id == job.members[late] and kill.silent and "in another" in kill.reason
    assert (wait in timers(job)) == (len(ranks) > 1), "the others are waited for"


def test_sources_that_compare_are_not_late_with_their_offer() -> None:
    job = compared(at_work(2))
    job.exit(1)
    job.settle(0, "aborted", 5)
    assert {"vouch", "offer", "join"} <= timers(job).keys()
    job.post(Tick(name="offer"), after_s=15.0)
    assert job.sent(KillMember) == [] and "offer" in timers(job)
    job.post(Tick(name="vouch"), after_s=60.0)
    (kill,) = job.sent(KillMember)
    assert (kill.member_id, kill.reason) == (job.members[0], "did not tell what it holds within 60 s")


def test_a_newcomer_that_waits_for_its_state_is_not_late() -> None:
    job = with_a_newcomer()
    has_state(job, 1, 0)
    job.post(JoinAsked(member_id=job.members[1], generation=job.generation))
    for _ in range(3):
        job.post(Tick(name="join"), after_s=120.0)
        assert job.sent(KillMember) == [], "its sources are slow, or to be killed for that"
    for rank in (0, 2):
        job.post(
            StateOffered(member_id=job.members[rank], generation=job.generation, step=5, host="h", port=1)
        )
    job.post(Tick(name="join"), after_s=120.0)
    job.post(Tick(name="join"), after_s=120.0)
    assert [kill.member_id for kill in job.sent(KillMember)] == [job.members[1]]


def test_a_rank_on_a_silent_node_is_not_late_and_has_the_whole_bound_once_its_node_is_back() -> None:
    """Regression: the order reached a rank behind a cut when its bound was over, and the rank was killed for that."""
    job = fenced()
    job.post(AgentGone(node_id=NODE))
    job.post(Tick(name="quiesce"), after_s=5.0)
    assert job.sent(KillMember) == [] and "quiesce" in timers(job)
    job.post(AgentHello(node_id=NODE, slots=3, pid=2, members=(seen(job)[0], seen(job)[2])), after_s=4.9)
    job.post(AgentBeat(node_id=NODE))
    assert {fence.member_id for fence in job.sent(Fence)} == {job.members[0], job.members[2]}
    job.post(Tick(name="quiesce"), after_s=0.1)
    assert job.sent(KillMember) == [] and "quiesce" in timers(job), "they have only had the order for 0.1 s"
    job.post(Tick(name="quiesce"), after_s=5.0)
    assert {kill.member_id for kill in job.sent(KillMember)} == {job.members[0], job.members[2]}


def test_a_node_that_is_heard_again_without_a_hello_gives_its_ranks_the_whole_bound() -> None:
    job = fenced()
    job.post(AgentBeat(node_id=NODE))
    job.post(Tick(name="beat"), after_s=4.0)
    job.post(AgentBeat(node_id=NODE), after_s=0.9)
    job.post(Tick(name="quiesce"), after_s=0.1)
    assert job.sent(KillMember) == [] and "quiesce" in timers(job)


def test_a_rank_on_a_silent_node_is_not_late_with_its_start_or_its_end() -> None:
    job = Job()
    job.post(AgentHello(node_id=NODE, slots=3, pid=1))
    job.hello()
    for member in job.controller.job.roster.members:
        member.said_hello = member.rank > 0
    job.post(AgentGone(node_id=NODE))
    job.post(Tick(name="startup"), after_s=120.0)
    assert job.sent(KillMember) == [] and timers(job)["startup"].delay_s == job.config.adoption_s
    job = Job().up()
    fail(job, 1, user_error=True)
    job.post(AgentGone(node_id=NODE))
    failing = f"failing:{job.members[1]}"
    job.post(Tick(name=failing), after_s=2.0)
    assert job.sent(KillMember) == [] and failing in timers(job)


def test_the_first_bound_follows_from_the_size_of_the_state() -> None:
    job = Job().up()
    size_bytes = 400 * RATE_BYTES_PER_S
    version = LayoutVersion(job.generation, 0)
    job.post(LayoutPublished(job.members[0], job.generation, 0, version, Layout(b"{}", b""), size_bytes))
    job.exit(1)
    job.settle(0, "aborted", 5)
    job.settle(2, "aborted", 5)
    assert timers(job)["gasp"].delay_s == job.config.gasp_s + 400


def test_a_newcomer_has_the_time_that_the_first_ones_took_for_their_start() -> None:
    """Models are compiled for minutes, which no status page shows."""
    job = at_work(2)
    for member in job.members:
        job.post(StepReached(member_id=member, generation=job.generation, step=1), after_s=100.0)
    job.post(StepReached(member_id=job.members[0], generation=job.generation, step=1), after_s=9000.0)
    job.exit(1)
    job.settle(0, "aborted", 5)
    assert timers(job)["join"].delay_s == pytest.approx(400.0, abs=1.0)


def test_a_stopped_process_is_not_waited_for() -> None:
    """Regression: a rank that served its state was stopped, and newcomers waited 48 s for it."""
    job = with_a_newcomer()
    for rank in (0, 2):
        job.post(
            StateOffered(member_id=job.members[rank], generation=job.generation, step=5, host="h", port=1)
        )
    active(job, stopped=(2,))
    (kill,) = job.sent(KillMember)
    assert (
        kill.member_id == job.members[2]
        and kill.silent
        and kill.reason == "hangs: its process is stopped (state T)"
    )
    active(job, stopped=(2,))
    assert job.sent(KillMember) == [], "once"


def test_a_stopped_process_that_has_answered_the_fence_is_nobody_s_trouble_yet() -> None:
    job = fenced()
    job.settle(0, "aborted", 5)
    active(job, stopped=(0,))
    assert job.sent(KillMember) == []
    active(job, stopped=(2,))
    assert [kill.member_id for kill in job.sent(KillMember)] == [job.members[2]]


def test_a_job_that_is_suspended_as_a_whole_is_not_killed_for_that() -> None:
    job = with_a_newcomer()
    active(job, stopped=(0, 1, 2))
    assert job.sent(KillMember) == []


def unkillable() -> Job:
    """Return a job in which rank 2 has not answered the fence and does not die."""
    job = fenced()
    job.settle(0, "aborted", 5)
    job.post(Tick(name="quiesce"), after_s=5.0)
    job.post(Tick(name=f"kill:{job.members[2]}"), after_s=30.0)
    return job


def test_one_that_does_not_die_is_given_up_with_what_its_page_says() -> None:
    """Regression: a process in an uninterruptible wait was given up without the contents of its status page."""
    job = unkillable()
    (order,) = job.sent(KillMember)
    assert order.given_up and order.member_id == job.members[2]
    assert not any(r.kind == "planned" for r in job.records)
    job.exit(2, "updating", 5)
    assert job.record("planned")["step"] == 6, "its page proves it"


def test_one_that_does_not_die_and_whose_agent_says_nothing_is_lost() -> None:
    job = unkillable()
    job.post(Tick(name=f"kill:{job.members[2]}"), after_s=5.0)
    assert job.record("member_lost")["rank"] == 2 and job.record("planned")["step"] == 5
