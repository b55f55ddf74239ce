"""The controller, driven by hand: its messages, their receivers and their order, for each way a run can go."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec
import pytest

from holdfast.core.config import Config
from holdfast.core.controller import Controller
from holdfast.core.ids import Generation, LayoutVersion, MemberId, NodeId, SaveId
from holdfast.core.job.log_replay import ReplayedState
from holdfast.core.protocol.health_messages import StateDigests, StepTimes
from holdfast.core.protocol.layout_messages import Layout, Layouts
from holdfast.core.protocol.messages import (
    AgentBeat,
    AgentGone,
    AgentHello,
    CancelTimer,
    Catalogued,
    Command,
    FaultSeen,
    Fence,
    Finish,
    KillMember,
    LayoutPublished,
    Leave,
    LogRecord,
    MemberExited,
    MemberSeen,
    MemberStarted,
    Message,
    RankState,
    ResumeInPlace,
    SaveReported,
    Send,
    SessionOpened,
    SetTimer,
    Settle,
    Settled,
    StartMembers,
    StepReached,
    Tick,
    WorkerFailed,
    WorkerHello,
)
from holdfast.exit_codes import Exit

NODE = NodeId("node0")
M = TypeVar("M", bound=Message)


def covered(layouts: Layouts, sources: tuple[int, ...]) -> str:
    """Stand for the planner and accept every layout, as in pure data parallelism."""
    return ""


class Job:
    """A controller and the log of its commands."""

    def __init__(self, world_size: int = 3, past: ReplayedState | None = None, **config: Any) -> None:
        self.config = Config(run_id="run", world_size=world_size, **config)
        self.past = past or ReplayedState()
        self.controller = Controller(self.config, self.past, covered)
        self.now = 0.0
        self.log: list[Command] = []
        self.records: list[LogRecord] = []
        self.last: list[Command] = []
        self._take(self.controller.start(self.now))

    def _take(self, commands: list[Command]) -> None:
        self.last = commands
        self.log += commands
        self.records += [c for c in commands if isinstance(c, LogRecord)]
        self.controller.check()

    def post(self, event: Message, after_s: float = 0.01) -> list[Command]:
        self.now += after_s
        if isinstance(event, Tick):
            self.log.append(CancelTimer(name=event.name))  # the timer has fired
        self._take(self.controller.handle(self.now, event))
        if not self.config.verify:
            self._vouch()
        return self.last

    def _vouch(self) -> None:
        """Answer requests for digests with equal ones. If copies are compared, the test answers instead."""
        asked = [settle for settle in self.sent(Settle) if settle.vouch]
        said = [c for c in self.last if not (isinstance(c, Send) and c.message in asked)]
        for settle in asked:
            vouched = StateDigests(settle.member_id, settle.generation, settle.step, copies=())
            self._take(self.controller.handle(self.now, vouched))
            said += self.last
        self.last = said

    def sent(self, kind: type[M]) -> list[M]:
        """Return the messages of ``kind`` among the last commands."""
        return [c.message for c in self.last if isinstance(c, Send) and isinstance(c.message, kind)]

    def record(self, kind: str) -> dict[str, Any]:
        """Return the data of the newest record of ``kind``."""
        return next(dict(r.data) for r in reversed(self.records) if r.kind == kind)

    @property
    def generation(self) -> Generation:
        return self.controller.job.generation

    @property
    def members(self) -> list[MemberId]:
        return [m.member_id for m in self.controller.job.roster.members]

    def up(self, step: int = 0) -> Job:
        """Start everything, open every session at ``step``, and let all ranks commit one step."""
        self.post(AgentHello(node_id=NODE, slots=self.config.world_size, pid=1))
        self.hello()
        self.open(step)
        for member in self.members:
            self.post(StepReached(member_id=member, generation=self.generation, step=step + 1))
        return self

    def hello(self) -> None:
        for rank, member in enumerate(self.members):
            self.post(MemberStarted(member_id=member, node_id=NODE, pid=100 + member))
            self.post(WorkerHello(member_id=member, generation=self.generation, rank=rank, pid=100 + member))

    def open(self, step: int, live: bool = False) -> None:
        for rank, member in enumerate(self.members):
            generation = self.generation
            self.post(
                SessionOpened(member_id=member, generation=generation, step=step, root="/ck", live=live)
            )
            self.post(
                LayoutPublished(member, generation, rank, LayoutVersion(generation, 0), Layout(b"{}", b""))
            )

    def exit(self, rank: int, state: RankState = "compute", step: int = 5, **how: Any) -> None:
        how = how or {"signal": 9}
        event = MemberExited(
            member_id=self.members[rank],
            node_id=NODE,
            generation=self.generation,
            code=how.get("code"),
            signal=how.get("signal"),
            state=state,
            step=step,
            detail=how.get("detail", "backward"),
            locals={4: b'{"at": 4}', 5: b'{"at": 5}', 7: b'{"at": 7}'},
            died_ns=int((self.now + 0.009) * 1e9),
            staged_step=how.get("staged_step", 0),
            kept=how.get("kept", ()),
            oom_kills=how.get("oom_kills", 0),
        )
        self.post(event)

    def settle(
        self,
        rank: int,
        state: RankState,
        step: int,
        generation: Generation | None = None,
        *,
        away: bool = False,
    ) -> None:
        self.post(
            Settled(
                member_id=self.members[rank],
                generation=generation or self.generation,
                state=state,
                step=step,
                away=away,
            )
        )

    def seal(self, order: Settle) -> None:
        assert order.save is not None
        for rank in order.save.sources:
            self.post(
                SaveReported(
                    member_id=self.members[rank],
                    generation=order.generation,
                    save_id=order.save.save_id,
                    sealed=rank == order.save.sources[-1],
                    size_bytes=10,
                    duration_s=0.1,
                )
            )

    def save_fails(self, order: Settle) -> None:
        """Report that rank 0 could not write its share."""
        assert order.save is not None
        self.post(
            SaveReported(
                member_id=self.members[0],
                generation=order.generation,
                save_id=order.save.save_id,
                sealed=False,
                size_bytes=0,
                duration_s=0.0,
                error="no space left on device",
            )
        )

    def outcome(self) -> Finish:
        finish = self.log[-1]
        assert isinstance(finish, Finish), self.log[-3:]
        return finish


def test_a_job_level_answer_saves_and_leaves_for_the_scheduler() -> None:
    job = Job(on_fault="job").up()
    job.exit(1)
    job.settle(0, "aborted", 5)
    job.settle(2, "aborted", 5)
    (order, _) = job.sent(Settle)
    assert job.record("verdict")["rung"] == "requeue" and order.save is not None
    job.seal(order)
    assert {leave.code for leave in job.sent(Leave)} == {Exit.REQUEUE}
    job.exit(0, code=75)
    job.exit(2, code=75)
    assert job.outcome().code == Exit.REQUEUE and "the scheduler starts the job again" in job.outcome().reason
    assert not job.sent(StartMembers)


def test_start_waits_for_the_agents_and_seats_every_rank() -> None:
    job = Job(world_size=4, nnodes=2)
    job.post(AgentHello(node_id=NodeId("a"), slots=2, pid=1))
    assert job.sent(StartMembers) == []
    job.post(AgentHello(node_id=NodeId("b"), slots=2, pid=2))
    orders = job.sent(StartMembers)
    assert [(o.node_id, [(a.rank, a.local_rank) for a in o.members]) for o in orders] == [
        ("a", [(0, 0), (1, 1)]),
        ("b", [(2, 0), (3, 1)]),
    ]
    assert {o.generation for o in orders} == {Generation(1, 1)}


def test_agents_that_never_come_end_the_run_and_are_counted() -> None:
    job = Job(world_size=4, nnodes=2)
    job.post(AgentHello(node_id=NodeId("a"), slots=2, pid=1))
    job.post(Tick(name="startup"))
    assert job.outcome().code == Exit.FAILED and "1 of 2 agents" in job.outcome().reason


def test_a_death_fences_saves_and_restarts_without_loss() -> None:
    job = Job().up()
    job.exit(1)
    assert [f.member_id for f in job.sent(Fence)] == [job.members[0], job.members[2]]
    assert job.record("fenced")["dead_ranks"] == [1]
    job.settle(0, "aborted", 5)
    job.settle(2, "aborted", 5)
    kinds = [c.kind if isinstance(c, LogRecord) else type(c).__name__ for c in job.last]
    assert kinds.index("planned") < kinds.index("Send"), "the decision is written before it is sent"
    orders = job.sent(Settle)
    assert [(o.step, o.then, o.save and o.save.sources) for o in orders] == [(5, "restart", (0, 2))] * 2
    assert orders[0].save is not None
    assert orders[0].save.dead_locals == {"1": b'{"at": 5}'}
    assert orders[0].save.save_id == SaveId("run", Generation(1, 2), 5, 1, "last-gasp")
    job.seal(orders[0])
    assert {leave.code for leave in job.sent(Leave)} == {Exit.RESTART}
    job.exit(0, code=78)
    assert job.sent(StartMembers) == [], "no member starts while an old member lives"
    job.exit(2, code=78)
    (start,) = job.sent(StartMembers)
    assert start.resume == "step-00000005.run.g1.2.a1" and start.generation == Generation(1, 2)
    assert [a.member_id for a in start.members] == [4, 5, 6] and start.restart_count == 1
    job.hello()
    job.open(5)
    for member in job.members:
        job.post(StepReached(member_id=member, generation=job.generation, step=6))
    recovered = job.record("recovered")
    assert (recovered["rank"], recovered["kind"], recovered["steps_lost"]) == (1, "signal", 0)
    assert (
        0
        < recovered["detected_s"]
        <= recovered["planned_s"]
        < recovered["restored_s"]
        < recovered["resumed_s"]
    )


def test_ranks_in_doubt_follow_a_dead_page() -> None:
    job = Job().up()
    job.exit(1, state="updating")
    job.settle(0, "in_doubt", 5)
    job.settle(2, "in_doubt", 5)
    assert {o.step for o in job.sent(Settle)} == {6}
    planned = job.record("planned")
    assert (planned["decision"], planned["in_doubt"]) == ("forward", 2)
    assert planned["evidence"] == ["dead rank 1 was in the update of step 5"]


def test_the_decision_waits_for_everyone_and_refuses_stale_answers() -> None:
    job = Job().up()
    job.exit(1)
    job.settle(0, "aborted", 5)
    job.settle(2, "aborted", 5, generation=Generation(1, 1))
    assert not any(r.kind == "planned" for r in job.records)
    job.post(Tick(name="quiesce"))
    assert [k.member_id for k in job.sent(KillMember)] == [3]
    job.exit(2, state="updating")
    assert job.record("planned")["step"] == 6
    assert job.record("detected")["kind"] == "silent"


def test_whose_steps_take_long_may_be_long_in_an_update() -> None:
    job = Job().up()
    assert job.controller.job.settle_s == job.config.quiesce_s
    job.post(StepTimes(node_id=NODE, generation=job.generation, ranks=(), step_s=30.0))
    job.exit(1, state="updating")
    assert SetTimer(name="quiesce", delay_s=60.0) in job.last


def test_a_second_death_during_the_save_starts_again() -> None:
    job = Job(world_size=4).up()
    job.exit(3)
    for rank in range(3):
        job.settle(rank, "aborted", 5)
    first = job.sent(Settle)[0]
    job.exit(0, state="aborted")
    assert {f.generation for f in job.sent(Fence)} == {Generation(1, 3)}
    for rank in (1, 2):
        job.settle(rank, "aborted", 5)
    second = job.sent(Settle)[0]
    assert first.save and second.save
    assert (first.save.save_id.attempt, second.save.save_id.attempt) == (1, 2)
    assert second.save.sources == (1, 2)
    job.seal(first)
    assert job.sent(Leave) == [], "an order of an older generation seals nothing"


def test_a_failed_save_is_tried_without_the_rank_that_failed() -> None:
    job = Job().up()
    job.exit(1)
    job.settle(0, "aborted", 5)
    job.settle(2, "aborted", 5)
    order = job.sent(Settle)[0]
    job.save_fails(order)
    job.settle(0, "aborted", 5)
    job.settle(2, "aborted", 5)
    again = job.sent(Settle)
    assert [o.save.sources for o in again if o.save] == [(2,)]


@pytest.mark.parametrize("on_fault", ["restart", "crash:restart"])
def test_another_attempt_to_save_answers_no_other_fault(on_fault: str) -> None:
    """Regression: the last fault within the budget ended the run when its save failed once.

    A rung that the user had named for this kind of fault (``crash:restart``) was forgotten.
    """
    job = Job(max_restarts=1, on_fault=on_fault).up()
    for member in job.controller.job.roster.members:
        member.live = True
    job.exit(2)
    job.settle(0, "aborted", 5)
    job.settle(1, "aborted", 5)
    job.save_fails(job.sent(Settle)[0])
    job.settle(0, "aborted", 5)
    job.settle(1, "aborted", 5)
    assert job.record("verdict")["action"] == "restart_last_gasp" and not job.record("verdict")["counts"]
    assert len(job.controller.job.answered) == len(ReplayedState.read(job.records).answered) == 1
    job.exit(0)
    job.settle(1, "aborted", 5)
    assert job.record("verdict")["action"] == "stop_budget", "another fault is one too many"


def test_a_broken_collective_without_a_death_is_retried_in_place() -> None:
    job = Job().up()
    job.post(FaultSeen(member_id=job.members[0], generation=job.generation, step=5, what="reset"))
    assert job.sent(Fence) == []
    job.post(Tick(name="grace"), after_s=0.3)
    assert len(job.sent(Fence)) == 3
    job.settle(0, "in_doubt", 5)
    job.settle(1, "ready", 6)
    job.settle(2, "in_doubt", 5)
    assert {(o.step, o.then) for o in job.sent(Settle)} == {(6, "retry")}
    job.settle(0, "ready", 6)
    assert job.sent(ResumeInPlace) == [], "rank 2 has not applied its update yet"
    job.settle(2, "ready", 6)
    assert {r.step for r in job.sent(ResumeInPlace)} == {6}
    for member in job.members:
        job.post(StepReached(member_id=member, generation=job.generation, step=7))
    assert job.record("recovered")["kind"] == "collective"
    assert job.members == [1, 2, 3], "no member was replaced"


def test_a_death_within_the_grace_explains_the_collective() -> None:
    job = Job().up()
    job.post(FaultSeen(member_id=job.members[0], generation=job.generation, step=5, what="reset"))
    job.exit(1)
    assert len(job.sent(Fence)) == 2
    job.post(Tick(name="grace"))
    assert job.last == []


def test_a_torn_rank_is_no_source() -> None:
    job = Job().up()
    job.post(FaultSeen(member_id=job.members[0], generation=job.generation, step=5, what="reset"))
    job.post(Tick(name="grace"))
    job.settle(0, "torn", 5)
    job.settle(1, "ready", 6)
    job.settle(2, "ready", 6)
    assert job.record("verdict")["action"] == "restart_last_gasp"
    assert [o.save.sources for o in job.sent(Settle) if o.save] == [(1, 2)] * 2


def fail(job: Job, rank: int, user_error: bool = False) -> None:
    job.post(
        WorkerFailed(
            member_id=job.members[rank],
            generation=job.generation,
            step=5,
            kind="ValueError",
            what="bad batch",
            traceback="",
            digest="d",
            user_error=user_error,
        )
    )


def test_a_typed_error_saves_and_stops() -> None:
    job = Job().up()
    fail(job, 1, user_error=True)
    assert len(job.sent(Fence)) == 2, "an exception is a death in progress"
    job.settle(0, "aborted", 5)
    job.settle(2, "aborted", 5)
    assert not any(r.kind == "planned" for r in job.records), "its page may still prove a commit"
    job.exit(1, state="aborted", code=1)
    (order, _) = job.sent(Settle)
    assert order.then == "stop"
    job.seal(order)
    assert {leave.code for leave in job.sent(Leave)} == {Exit.BAD_INPUT}
    job.exit(0, code=3)
    job.exit(2, code=3)
    assert job.outcome().code == Exit.BAD_INPUT


def test_a_failed_worker_that_stays_is_killed() -> None:
    job = Job().up()
    fail(job, 1)
    timers = [c.name for c in job.last if isinstance(c, SetTimer)]
    assert "failing:2" in timers
    job.post(Tick(name="failing:2"))
    assert [k.member_id for k in job.sent(KillMember)] == [2]


@pytest.mark.parametrize(("staged_step", "action"), [(4, "restart_checkpoint"), (0, "restart_fresh")])
def test_when_all_die_a_save_in_flight_is_worth_waiting_for(staged_step: int, action: str) -> None:
    job = Job().up()
    for rank in range(3):
        job.exit(rank, signal=9, staged_step=staged_step)
    assert job.record("verdict")["action"] == action


def test_scripts_without_a_session_end_or_start_again_together() -> None:
    job = Job(world_size=2)
    job.post(AgentHello(node_id=NODE, slots=2, pid=1))
    job.hello()
    job.exit(0, state="starting", step=0, code=0)
    job.exit(1, state="starting", step=0, code=3)
    assert job.record("verdict")["action"] == "restart_fresh"
    assert len(job.sent(StartMembers)) == 1
    job.hello()
    job.exit(0, state="starting", step=0, code=0)
    job.exit(1, state="starting", step=0, code=0)
    assert job.outcome().code == Exit.OK


def test_leaving_with_code_zero_before_the_end_is_a_fault() -> None:
    job = Job().up()
    job.exit(1, code=0)
    assert job.record("detected")["kind"] == "exit"


def test_leaving_for_a_restart_is_told_without_the_inner_code() -> None:
    job = Job().up()
    job.exit(1, code=int(Exit.RESTART))
    assert job.record("detected")["what"] == "left for a restart"


def test_a_rank_that_leaves_because_of_a_fault_is_no_fault() -> None:
    job = Job()
    job.post(AgentHello(node_id=NODE, slots=3, pid=1))
    job.hello()
    job.exit(1, "starting", 0, code=1)
    job.exit(0, "starting", 0, code=int(Exit.RESTART))
    assert [(r.data["rank"], r.data["kind"]) for r in job.records if r.kind == "detected"] == [(1, "exit")]
    job.exit(2, "starting", 0, signal=15)
    assert len(job.sent(StartMembers)) == 1 and job.record("verdict")["action"] == "restart_fresh"


def test_all_layouts_make_a_catalogue_once() -> None:
    job = Job().up()
    catalogues = [c.message for c in job.log if isinstance(c, Send) and isinstance(c.message, Catalogued)]
    assert len(catalogues) == 1 and set(catalogues[0].layouts.by_rank()) == {0, 1, 2}


def successor(job: Job, **changes: Any) -> Job:
    """Return a controller of the next term, with the log of the one before it."""
    return Job(past=ReplayedState.read(job.records), term=2, **changes)


def seen(job: Job) -> tuple[MemberSeen, ...]:
    return tuple(
        MemberSeen(m, Generation(1, 1), rank, 100 + m, "compute", 5) for rank, m in enumerate(job.members)
    )


def test_a_successor_disturbs_nobody_when_nothing_happened() -> None:
    job = Job().up()
    second = successor(job)
    second.post(AgentHello(node_id=NODE, slots=3, pid=1, members=seen(job)))
    second.post(AgentBeat(node_id=NODE))
    assert second.sent(Fence) == [] and second.record("adopted")["dead"] == []
    second.exit(1)
    assert {f.generation for f in second.sent(Fence)} == {Generation(2, 2)}


def test_a_successor_finds_who_died_meanwhile() -> None:
    job = Job().up()
    second = successor(job)
    second.post(AgentHello(node_id=NODE, slots=3, pid=1, members=(seen(job)[0], seen(job)[2])))
    second.exit(1, state="updating")
    assert second.sent(Fence) == [], "the list is not closed yet"
    second.post(AgentBeat(node_id=NODE))
    assert len(second.sent(Fence)) == 2 and second.record("detected")["rank"] == 1


def test_a_successor_starts_an_unfinished_recovery_again() -> None:
    job = Job().up()
    job.post(FaultSeen(member_id=job.members[0], generation=job.generation, step=5, what="reset"))
    job.post(Tick(name="grace"))
    second = successor(job)
    second.post(AgentHello(node_id=NODE, slots=3, pid=1, members=seen(job)))
    second.post(AgentBeat(node_id=NODE))
    assert {f.generation for f in second.sent(Fence)} == {Generation(2, 3)}


def test_an_agent_that_returns_in_time_is_no_fault_and_one_that_does_not_is() -> None:
    job = Job().up()
    job.post(AgentGone(node_id=NODE))
    job.post(AgentHello(node_id=NODE, slots=3, pid=2, members=seen(job)))
    job.post(AgentBeat(node_id=NODE))
    assert not any(r.kind == "detected" for r in job.records)
    job.post(AgentGone(node_id=NODE))
    for _ in range(12):
        job.post(Tick(name="beat"), after_s=1.0)
    assert job.record("node_lost")["node"] == NODE
    assert job.record("member_lost")["rank"] == 2


def test_who_was_to_be_killed_is_killed_by_the_next_agent() -> None:
    """Regression: the agent that had the order to kill died.

    The process was given up and lived beside its replacement.
    """
    job = Job().up()
    job.exit(1)
    job.settle(0, "aborted", 5)
    job.post(Tick(name="quiesce"), after_s=5.0)
    assert [kill.member_id for kill in job.sent(KillMember)] == [job.members[2]]
    job.post(AgentGone(node_id=NODE))
    job.post(AgentHello(node_id=NODE, slots=3, pid=2, members=(seen(job)[0], seen(job)[2])))
    assert [kill.member_id for kill in job.sent(KillMember)] == [job.members[2]]


def test_library_mode_saves_and_never_starts_anyone() -> None:
    job = Job(world_size=2, library=True)
    job.post(AgentHello(node_id=NODE, slots=2, pid=1))
    for rank in range(2):
        hello = WorkerHello(member_id=MemberId(rank + 1), generation=Generation(1, 1), rank=rank, pid=rank)
        job.post(hello)
    job.open(0)
    job.exit(1)
    job.settle(0, "aborted", 5)
    job.seal(job.sent(Settle)[0])
    assert {leave.code for leave in job.sent(Leave)} == {Exit.FAILED}
    job.exit(0, code=1)
    assert job.outcome().code == Exit.FAILED
    assert not any(isinstance(c, Send) and isinstance(c.message, StartMembers) for c in job.log)


def test_a_process_of_an_older_generation_is_told_to_leave() -> None:
    job = Job().up()
    job.post(WorkerHello(member_id=MemberId(99), generation=Generation(1, 1), rank=0, pid=1))
    assert [leave.member_id for leave in job.sent(Leave)] == [99]


def test_every_command_can_be_written_and_sent() -> None:
    job = Job().up()
    job.exit(1)
    job.settle(0, "aborted", 5)
    job.settle(2, "aborted", 5)
    for command in job.log:
        assert msgspec.json.encode(command)
