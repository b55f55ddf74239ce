"""Spares in the agent machine: built only beside a training job, called once, and without a rank until then."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast.core.agent import Agent
from holdfast.core.config import AgentConfig
from holdfast.core.ids import Generation, MemberId, NodeId
from holdfast.core.job.spares import ANY_RANK, SPARE_TIMER, BuildSpare, CallSpare, Spares, SpareWaits
from holdfast.core.protocol.health_messages import Late
from holdfast.core.protocol.messages import (
    Assignment,
    Command,
    ControllerHere,
    EndRun,
    KillMember,
    LogRecord,
    MemberExited,
    MemberStarted,
    Message,
    Send,
    SetTimer,
    StartMembers,
    StepReached,
    Tick,
    WorkerFailed,
    WorkerHello,
)

NODE = NodeId("node0")
G1, G2 = Generation(1, 1), Generation(1, 2)


class Node:
    """An agent whose two workers train, connected to a controller."""

    def __init__(self, spares: int = 1) -> None:
        self.agent = Agent(AgentConfig(node_id=NODE, slots=2, pid=7, spares=spares, world_size=2))
        self.said: list[Command] = list(self.agent.start(0.0))
        self.post(ControllerHere())
        self.start(G1, (1, 2))
        self.trains(1, 0, G1)
        self.trains(2, 1, G1)

    def post(self, event: Message) -> list[Command]:
        self.last = self.agent.handle(0.0, event)
        self.agent.check()
        self.said += self.last
        return self.last

    def start(
        self, generation: Generation, members: tuple[int, ...], ranks: tuple[int, ...] = (0, 1)
    ) -> None:
        seats = tuple(Assignment(MemberId(m), rank, rank) for m, rank in zip(members, ranks, strict=True))
        self.post(
            StartMembers(
                node_id=NODE,
                generation=generation,
                world_size=2,
                attempt=0,
                members=seats,
                join=generation != G1,
            )
        )

    def trains(self, member: int, rank: int, generation: Generation) -> None:
        self.post(
            WorkerHello(
                member_id=MemberId(member),
                generation=generation,
                rank=rank,
                pid=member,
                state="starting",
                step=0,
            )
        )
        self.post(StepReached(member_id=MemberId(member), generation=generation, step=1))

    def dies(self, member: int) -> None:
        self.post(
            MemberExited(
                member_id=MemberId(member),
                node_id=NODE,
                generation=G1,
                code=None,
                signal=9,
                state="compute",
                step=1,
            )
        )

    def to_shell(self, kind: type[Message]) -> list[Any]:
        return [
            c.message
            for c in self.said
            if isinstance(c, Send) and c.to == "shell" and isinstance(c.message, kind)
        ]

    def records(self, kind: str) -> list[LogRecord]:
        return [c for c in self.said if isinstance(c, LogRecord) and c.kind == kind]

    def built(self) -> list[MemberId]:
        """Return the ids of all spares that were ordered."""
        return [order.member_id for order in self.to_shell(BuildSpare)]

    def waits(self, spare: int, ready: bool = True) -> None:
        self.post(SpareWaits(member_id=MemberId(spare), ready=ready))


def test_spares_are_built_when_every_worker_trains() -> None:
    node = Node(spares=0)
    assert node.built() == []
    node = Node(spares=1)
    (order,) = node.to_shell(BuildSpare)
    assert order.member_id < 0 and order.rank == ANY_RANK and order.generation == G1
    node.post(Tick(name=SPARE_TIMER))
    assert len(node.built()) == 1


def test_a_waiting_spare_takes_the_seat_of_a_newcomer_once() -> None:
    node = Node()
    (spare,) = node.built()
    node.waits(spare)
    node.dies(1)
    node.start(G2, (3,), (0,))
    (call,) = node.to_shell(CallSpare)
    assert call.spare == spare and [m.member_id for m in call.order.members] == [3]
    node.dies(2)
    node.start(Generation(1, 3), (4,), (1,))
    assert len(node.to_shell(CallSpare)) == 1
    assert [m.member_id for m in node.to_shell(StartMembers)[-1].members] == [4]


@pytest.mark.parametrize("stopped", [True, False])
def test_a_spare_that_hangs_while_it_is_built_is_killed_and_built_again(stopped: bool) -> None:
    node = Node()
    (spare,) = node.built()
    node.post(Late(member_id=spare, node_id=NODE, idle_s=15.2, stopped=stopped))
    (kill,) = node.to_shell(KillMember)
    assert kill.member_id == spare and "15.2 s" in kill.reason
    node.dies(spare)
    assert node.records("spare_gone")[0].data["why"] == kill.reason
    node.post(Tick(name=SPARE_TIMER))
    assert len(node.built()) == 2


def test_one_spare_for_two_deaths() -> None:
    node = Node()
    (spare,) = node.built()
    node.waits(spare)
    node.dies(1)
    node.dies(2)
    node.start(G2, (3, 4))
    (call,) = node.to_shell(CallSpare)
    assert [m.member_id for m in call.order.members] == [3]
    assert [m.member_id for m in node.to_shell(StartMembers)[-1].members] == [4]


def test_a_spare_that_is_not_built_is_not_called() -> None:
    node = Node()
    node.dies(1)
    node.start(G2, (3,), (0,))
    assert node.to_shell(CallSpare) == []


def test_the_one_that_is_built_furthest_is_called() -> None:
    said: list[Command] = []
    spares = Spares(AgentConfig(node_id=NODE, slots=3, pid=7, spares=2), said)
    spares.top_up(G1, [4, 5, 6])
    first, second = sorted(spares.living)
    for member_id, ready in ((first, True), (second, False)):
        spares.heard(SpareWaits(member_id=member_id, ready=ready))
    assert spares.take(Assignment(MemberId(9), 5, 1)) == first
    assert spares.take(Assignment(MemberId(10), 6, 2)) == second
    assert spares.take(Assignment(MemberId(11), 4, 0)) is None


def test_as_many_spares_as_workers_are_built_as_one_rank_each() -> None:
    node = Node(spares=2)
    assert [(o.rank, o.local_rank) for o in node.to_shell(BuildSpare)] == [(0, 0), (1, 1)]
    for spare in node.built():
        node.waits(spare)
    node.dies(2)
    node.start(G2, (3,), (1,))
    (call,) = node.to_shell(CallSpare)
    assert call.spare == node.to_shell(BuildSpare)[1].member_id
    node.trains(3, 1, G2)
    node.trains(1, 0, G2)
    assert [o.rank for o in node.to_shell(BuildSpare)] == [0, 1, 1]


def test_no_spare_is_built_beside_a_recovery() -> None:
    node = Node()
    (spare,) = node.built()
    node.dies(1)
    node.dies(spare)
    assert SetTimer(name=SPARE_TIMER, delay_s=2.0) in node.last
    node.post(Tick(name=SPARE_TIMER))
    assert len(node.built()) == 1
    node.start(G2, (3,), (0,))
    node.trains(3, 0, G2)
    assert len(node.built()) == 2


def test_a_killed_spare_is_replaced_and_one_that_cannot_be_built_is_given_up() -> None:
    node = Node()
    node.waits(node.built()[-1])
    node.dies(node.built()[-1])
    assert SetTimer(name=SPARE_TIMER, delay_s=1.0) in node.last
    for _ in range(3):
        node.post(Tick(name=SPARE_TIMER))
        failed = WorkerFailed(
            member_id=node.built()[-1],
            generation=G1,
            step=0,
            kind="ValueError",
            what="no",
            traceback="",
            digest="d",
        )
        node.post(failed)
        node.dies(node.built()[-1])
    assert len(node.built()) == 4
    (given_up,) = node.records("spares_given_up")
    assert given_up.data["why"] == "ValueError: no"
    node.post(Tick(name=SPARE_TIMER))
    assert len(node.built()) == 4


@pytest.mark.parametrize("connected", [True, False])
def test_nothing_that_a_spare_says_leaves_the_node(connected: bool) -> None:
    node = Node()
    (spare,) = node.built()
    node.agent.connected = connected
    before = len(node.agent._pending)
    node.said.clear()
    node.post(MemberStarted(member_id=spare, node_id=NODE, pid=9))
    hello = WorkerHello(member_id=spare, generation=G1, rank=-1, pid=9, state="starting", step=0)
    node.post(hello)
    node.post(StepReached(member_id=spare, generation=G1, step=3))
    node.waits(spare)
    node.dies(spare)
    assert not [c for c in node.said if isinstance(c, Send)]
    assert len(node.agent._pending) == before
    assert spare not in node.agent.workers


def test_a_called_spare_that_does_not_answer_is_killed() -> None:
    node = Node()
    (spare,) = node.built()
    node.waits(spare)
    node.dies(1)
    node.start(G2, (3,), (0,))
    node.post(Tick(name="called:3"))
    (kill,) = node.to_shell(KillMember)
    assert kill.member_id == 3
    answered = Node()
    answered.waits(answered.built()[0])
    answered.dies(1)
    answered.start(G2, (3,), (0,))
    answered.trains(3, 0, G2)
    answered.post(Tick(name="called:3"))
    assert answered.to_shell(KillMember) == []


def test_a_spare_for_another_number_of_ranks_is_built_anew() -> None:
    node = Node()
    node.waits(node.built()[0])
    seats = (Assignment(MemberId(3), 0, 0), Assignment(MemberId(4), 1, 1))
    node.post(StartMembers(node_id=NODE, generation=G2, world_size=4, attempt=1, members=seats))
    assert [kill.member_id for kill in node.to_shell(KillMember)] == node.built()
    node.dies(1)
    node.dies(2)
    node.trains(3, 0, G2)
    node.trains(4, 1, G2)
    assert [order.world_size for order in node.to_shell(BuildSpare)] == [2, 4]


def test_a_run_that_ends_builds_no_spare() -> None:
    node = Node()
    node.dies(node.built()[0])
    node.post(EndRun(code=0, reason="done"))
    node.post(Tick(name=SPARE_TIMER))
    assert len(node.built()) == 1
