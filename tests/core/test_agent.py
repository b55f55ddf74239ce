"""The agent machine: it starts members once, remembers, repeats answers, and leaves no process behind."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

from holdfast.core.agent import Agent
from holdfast.core.config import AgentConfig
from holdfast.core.ids import EVERYBODY, Generation, LayoutVersion, MemberId, NodeId
from holdfast.core.protocol.layout_messages import Layout, Layouts
from holdfast.core.protocol.messages import (
    Ack,
    AgentBeat,
    AgentHello,
    Assignment,
    CancelTimer,
    Catalogued,
    Command,
    ControllerGone,
    ControllerHere,
    EndRun,
    ExitAsked,
    ExitCancelled,
    ExitRun,
    FaultSeen,
    Fence,
    Finish,
    JoinAsked,
    Joined,
    KillMember,
    LauncherGone,
    LayoutPublished,
    MemberExited,
    MemberStarted,
    Message,
    RestartController,
    Send,
    SessionOpened,
    SetTimer,
    StartMembers,
    StopRun,
    Tick,
    WorkerHello,
)
from holdfast.core.protocol.notices import HoldReached
from holdfast.core.protocol.peer_messages import JobFormed
from holdfast.exit_codes import Exit

NODE = NodeId("node0")
G1, G2 = Generation(1, 1), Generation(1, 2)
M = TypeVar("M", bound=Message)


def order(generation: Generation, *members: int) -> StartMembers:
    """Return the order to start these members as ranks 0, 1, ..."""
    seats = tuple(Assignment(MemberId(m), rank, rank) for rank, m in enumerate(members))
    return StartMembers(
        node_id=NODE, generation=generation, world_size=len(members), attempt=0, members=seats
    )


class Desk:
    """An agent machine and its last commands."""

    def __init__(self, **config: Any) -> None:
        self.agent = Agent(AgentConfig(node_id=NODE, slots=2, **config))
        self.last: list[Command] = self.agent.start(0.0)

    def post(self, event: Message, now: float = 1.0) -> list[Command]:
        self.last = self.agent.handle(now, event)
        self.agent.check()
        return self.last

    def sent(self, to: str, kind: type[M]) -> list[M]:
        return [
            c.message for c in self.last if isinstance(c, Send) and c.to == to and isinstance(c.message, kind)
        ]

    def running(self) -> Desk:
        """Connect the agent and start two workers."""
        self.post(ControllerHere())
        self.post(order(G1, 1, 2))
        for rank, member in enumerate((1, 2)):
            self.post(MemberStarted(member_id=MemberId(member), node_id=NODE, pid=10 + member))
            self.post(hello(member, rank))
        return self


def hello(member: int, rank: int) -> WorkerHello:
    return WorkerHello(member_id=MemberId(member), generation=G1, rank=rank, pid=10 + member)


def exited(member: int) -> MemberExited:
    return MemberExited(
        member_id=MemberId(member), node_id=NODE, generation=G1, code=None, signal=9, state="compute", step=3
    )


def test_workers_tell_the_next_agent_what_all_ranks_hold() -> None:
    """The agent forwards one catalogue of the layouts, since all workers got the same one."""
    desk = Desk().running()
    old, new = (Catalogued(MemberId(1), G1, LayoutVersion(G1, vote), Layouts((), {})) for vote in (0, 3))
    assert desk.post(old) == [Send(to="controller", message=old)]
    assert desk.post(msgspec.structs.replace(old, member_id=MemberId(2))) == []
    assert desk.post(new) == [Send(to="controller", message=new)]
    assert desk.post(old) == []
    desk.post(ControllerGone())
    desk.post(ControllerHere())
    assert desk.sent("controller", Catalogued) == [new]
    assert [c.to for c in desk.post(msgspec.structs.replace(new, member_id=EVERYBODY)) if isinstance(c, Send)] == [
        "member:1", "member:2"
    ]  # fmt: skip


def test_the_heartbeat_starts_with_the_agent_and_goes_on() -> None:
    desk = Desk()
    assert desk.last == [SetTimer(name="beat", delay_s=1.0)]
    desk.post(Tick(name="beat"))
    assert desk.sent("controller", AgentBeat) == [], "no controller to report to yet"
    desk.post(ControllerHere())
    desk.post(Tick(name="beat"))
    assert len(desk.sent("controller", AgentBeat)) == 1


def test_a_member_is_started_once_however_often_it_is_ordered() -> None:
    desk = Desk()
    desk.post(ControllerHere())
    desk.post(order(G1, 1, 2))
    assert [[a.member_id for a in o.members] for o in desk.sent("shell", StartMembers)] == [[1, 2]]
    desk.post(order(G1, 1, 2))
    assert desk.sent("shell", StartMembers) == []
    desk.post(order(G2, 3, 4))
    desk.post(order(G1, 5, 6))
    assert desk.sent("shell", StartMembers) == [], "an order of an older generation"


def test_a_kill_before_the_start_is_not_forgotten() -> None:
    desk = Desk()
    desk.post(ControllerHere())
    desk.post(order(G1, 1))
    desk.post(KillMember(member_id=MemberId(1), node_id=NODE, reason="late"))
    desk.post(MemberStarted(member_id=MemberId(1), node_id=NODE, pid=11))
    assert [k.member_id for k in desk.sent("shell", KillMember)] == [1]


def test_messages_pass_both_ways() -> None:
    desk = Desk().running()
    desk.post(FaultSeen(member_id=MemberId(1), generation=G1, step=3, what="reset"))
    assert len(desk.sent("controller", FaultSeen)) == 1
    desk.post(Fence(member_id=MemberId(2), generation=G2, reason="rank 0 died"))
    assert len(desk.sent("member:2", Fence)) == 1


def test_a_new_controller_hears_everything_that_matters_and_then_a_beat() -> None:
    desk = Desk().running()
    desk.post(SessionOpened(member_id=MemberId(1), generation=G1, step=3, root="/ck"))
    desk.post(ControllerGone())
    assert any(isinstance(c, RestartController) for c in desk.last)
    desk.post(
        LayoutPublished(
            member_id=MemberId(1),
            generation=G1,
            rank=0,
            version=LayoutVersion(G1, 2),
            layout=Layout(b"{}", b""),
        )
    )
    desk.post(exited(2))
    desk.post(ExitRun(grace_s=9.0, source="cli"))
    assert [c for c in desk.last if isinstance(c, Send) and c.to == "controller"] == []
    desk.post(ControllerHere())
    told = [type(c.message).__name__ for c in desk.last if isinstance(c, Send) and c.to == "controller"]
    assert told[0] == "AgentHello" and told[-1] == "AgentBeat"
    assert {"SessionOpened", "LayoutPublished", "MemberExited", "ExitRun"} < set(told)
    (greeting,) = desk.sent("controller", AgentHello)
    assert [(m.member_id, m.state, m.step) for m in greeting.members] == [(1, "ready", 3)]


def test_what_a_newcomer_said_on_a_line_that_broke_is_repeated_on_the_next_one() -> None:
    """The controller lives and waits for it: it would kill the newcomer when its bound is over."""
    desk = Desk()
    desk.post(ControllerHere())
    desk.post(order(G1, 1))
    desk.post(JoinAsked(member_id=MemberId(1), generation=G1))
    desk.post(Joined(member_id=MemberId(1), generation=G1, step=3))
    desk.post(ControllerGone())
    desk.post(ControllerHere())
    assert [m.member_id for m in desk.sent("controller", JoinAsked)] == [1]
    assert [m.step for m in desk.sent("controller", Joined)] == [3]


def test_a_stop_of_all_ranks_is_reported_to_the_next_controller() -> None:
    """The ranks wait for an answer, which the controller that died may not have sent."""
    desk = Desk().running()
    stop = HoldReached(member_id=MemberId(1), generation=G1, step=3)
    assert desk.post(stop) == [Send(to="controller", message=stop)]
    desk.post(ControllerGone())
    desk.post(ControllerHere())
    assert desk.sent("controller", HoldReached) == [stop]


def test_a_successor_adopts_what_the_dead_agent_left() -> None:
    desk = Desk()
    desk.post(MemberStarted(member_id=MemberId(1), node_id=NODE, pid=11))
    desk.post(exited(2))
    desk.post(ControllerHere())
    (greeting,) = desk.sent("controller", AgentHello)
    assert [m.member_id for m in greeting.members] == [1]
    assert [e.member_id for e in desk.sent("controller", MemberExited)] == [2]
    desk.post(order(G1, 1, 2))
    assert desk.sent("shell", StartMembers) == [], "neither is started again"


def test_requests_are_acknowledged() -> None:
    desk = Desk().running()
    desk.post(ExitRun(grace_s=30.0, source="cli"))
    assert desk.sent("launcher", Ack) == [Ack(ok=True, detail="leaving within 30 s")]
    assert len(desk.sent("controller", ExitRun)) == 1
    desk.post(EndRun(code=0, reason="done"))
    desk.post(ExitRun(grace_s=30.0, source="cli"))
    assert [a.ok for a in desk.sent("launcher", Ack)] == [False]


def test_a_lost_launcher_is_a_request_to_leave() -> None:
    desk = Desk(grace_s=7.0).running()
    desk.post(LauncherGone())
    assert [(r.grace_s, r.source) for r in desk.sent("controller", ExitRun)] == [(7.0, "launcher lost")]


def test_the_end_kills_everyone_and_waits_for_them() -> None:
    desk = Desk().running()
    desk.post(EndRun(code=0, reason="done"))
    assert [k.member_id for k in desk.sent("shell", KillMember)] == [1, 2]
    desk.post(exited(1))
    assert not any(isinstance(c, Finish) for c in desk.last)
    desk.post(exited(2))
    assert desk.last[-1] == Finish(code=0, reason="done")


def test_stop_works_without_a_controller() -> None:
    desk = Desk().running()
    desk.post(ControllerGone())
    desk.post(StopRun(reason="second Ctrl-C"))
    desk.post(exited(1))
    desk.post(exited(2))
    assert desk.last[-1] == Finish(code=int(Exit.INTERRUPTED), reason="second Ctrl-C")


def test_who_is_asked_to_leave_before_anything_has_begun_leaves_at_once() -> None:
    desk = Desk()
    desk.post(ExitRun(grace_s=9.0, source="SIGTERM"))
    assert desk.sent("launcher", Ack) == [Ack(ok=True, detail="leaving at once: nothing has begun")]
    assert desk.last[-1] == Finish(
        code=int(Exit.UNSAVED),
        reason="asked to exit (SIGTERM): nothing had begun, no controller was there yet",
    )


def test_who_has_met_the_others_leaves_with_them() -> None:
    desk = Desk()
    desk.post(JobFormed())
    desk.post(ExitRun(grace_s=9.0, source="SIGTERM"))
    assert not any(isinstance(c, Finish) for c in desk.last)
    desk.post(ControllerHere())
    assert len(desk.sent("controller", ExitRun)) == 1


def test_a_request_keeps_its_deadline_without_a_controller() -> None:
    desk = Desk().running()
    desk.post(ControllerGone())
    desk.post(ExitRun(grace_s=9.0, source="SIGTERM"))
    assert SetTimer(name="leave", delay_s=9.0) in desk.last
    desk.post(Tick(name="leave"))
    assert [k.member_id for k in desk.sent("shell", KillMember)] == [1, 2]
    desk.post(exited(1))
    desk.post(exited(2))
    assert isinstance(desk.last[-1], Finish) and desk.last[-1].code == Exit.UNSAVED


def test_a_controller_that_is_back_has_the_deadline_from_then_on() -> None:
    desk = Desk().running()
    desk.post(ControllerGone())
    desk.post(ExitRun(grace_s=9.0, source="SIGTERM"))
    desk.post(ControllerHere())
    assert CancelTimer(name="leave") in desk.last and len(desk.sent("controller", ExitRun)) == 1


def test_every_controller_hears_what_was_asked_last_and_how_much_of_its_time_is_left() -> None:
    """A controller that died may not have read the request. A sent request is no proof of receipt."""
    desk = Desk().running()
    desk.post(ExitRun(grace_s=9.0, source="SIGTERM"), now=1.0)
    assert len(desk.sent("controller", ExitRun)) == 1
    desk.post(ControllerGone(), now=3.0)
    assert SetTimer(name="leave", delay_s=7.0) in desk.last
    desk.post(ControllerHere(), now=4.0)
    assert desk.sent("controller", ExitRun) == [ExitRun(grace_s=6.0, source="SIGTERM")]
    desk.post(ExitCancelled(source="cli"), now=5.0)
    desk.post(ControllerGone(), now=6.0)
    assert not any(isinstance(c, SetTimer) for c in desk.last)
    desk.post(ControllerHere(), now=7.0)
    assert desk.sent("controller", ExitRun) == []


def test_a_stop_that_a_dying_controller_did_not_read_is_a_stop() -> None:
    desk = Desk().running()
    desk.post(StopRun(reason="second Ctrl-C"))
    assert len(desk.sent("controller", StopRun)) == 1 and not desk.sent("shell", KillMember)
    desk.post(ControllerGone())
    assert len(desk.sent("shell", KillMember)) == 2
    desk.post(exited(1))
    desk.post(exited(2))
    assert desk.last[-1] == Finish(code=int(Exit.INTERRUPTED), reason="second Ctrl-C")


def test_a_request_that_is_taken_back_in_time_ends_nothing() -> None:
    desk = Desk().running()
    desk.post(ControllerGone())
    desk.post(ExitRun(grace_s=9.0, source="cli"))
    desk.post(ExitRun(grace_s=0.0, source="cli", cancel=True))
    assert CancelTimer(name="leave") in desk.last
    desk.post(ControllerHere())
    assert [r.cancel for r in desk.sent("controller", ExitRun)] == [True]


def test_a_controller_that_dies_again_and_again_ends_the_run() -> None:
    """A controller that connects first and then fails on its input also counts as dead."""
    desk = Desk(restarts_max=3)
    for _ in range(3):
        desk.post(ControllerGone())
        assert any(isinstance(c, RestartController) for c in desk.last)
        desk.post(ControllerHere())
    desk.post(ControllerGone())
    assert isinstance(desk.last[-1], Finish) and desk.last[-1].code == Exit.INTERNAL


def test_controllers_that_work_for_a_while_may_die_for_ever() -> None:
    desk = Desk(restarts_max=3, steady_s=0.0)
    for _ in range(9):
        desk.post(ControllerGone())
        assert any(isinstance(c, RestartController) for c in desk.last)
        desk.post(ControllerHere())


def test_what_is_kept_is_bounded() -> None:
    desk = Desk(pending_max=3).running()
    desk.post(ControllerGone())
    for number in range(5):
        desk.post(ExitAsked(member_id=MemberId(1), generation=G1, source=str(number)))
    desk.post(ControllerHere())
    assert [asked.source for asked in desk.sent("controller", ExitAsked)] == ["2", "3", "4"]
