"""Simulated spares: processes that wait until their agent calls them. A called spare becomes a worker."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Protocol

from holdfast.core.ids import MemberId, NodeId
from holdfast.core.job.spares import BuildSpare, CallSpare, SpareWaits, is_spare
from holdfast.core.protocol.messages import (
    KillMember,
    MemberExited,
    MemberStarted,
    Message,
    SessionOpened,
    StartMembers,
    StepReached,
)
from holdfast.sim.invariants import Violation

BUILT_S = (0.05, 0.3)


class Home(Protocol):
    """The interface of the simulated world that spares use."""

    rng: random.Random

    def later(self, delay_s: float, label: str, action: Callable[[], None]) -> None: ...
    def jitter(self, low_s: float, high_s: float) -> float: ...
    def tell_agent(self, node_id: NodeId, event: Message) -> None: ...
    def spawn(self, node_id: NodeId, order: StartMembers, delay_s: float) -> None: ...


class SimSpare:
    """The process of one spare. ``called`` is True after the process has become a worker."""

    def __init__(self, node_id: NodeId, order: BuildSpare) -> None:
        self.node_id = node_id
        self.order = order
        self.alive = True
        self.called = False


class SimSpares:
    """The spares of all nodes. Agents give orders to build, call and end spares, and this class executes them."""

    def __init__(self, world: Home) -> None:
        self.world = world
        self.calls = 0
        self._all: dict[MemberId, SimSpare] = {}

    def carry_out(self, node_id: NodeId, message: Message) -> bool:
        """Execute an order that the agent of a node gives. Return False if the order is not about a spare."""
        if isinstance(message, BuildSpare):
            self._build(node_id, message)
        elif isinstance(message, CallSpare):
            self._call(message)
        elif isinstance(message, KillMember) and is_spare(message.member_id):
            self._die(self._all[message.member_id])
        else:
            return False
        return True

    def kill_one(self, node_id: NodeId) -> None:
        """Simulate the death of a spare of a node: of the spare with the lowest member id that is not yet a worker."""
        living = [
            s for _, s in sorted(self._all.items()) if s.alive and not s.called and s.node_id == node_id
        ]
        if living:
            self._die(living[0])

    def agent_died(self, node_id: NodeId) -> None:
        """End the spares of a node whose agent died, except those that are workers now. No exit is reported."""
        for spare in self._all.values():
            if spare.node_id == node_id and not spare.called:
                spare.alive = False

    def _build(self, node_id: NodeId, order: BuildSpare) -> None:
        spare = self._all[order.member_id] = SimSpare(node_id, order)
        who, generation = order.member_id, order.generation

        def say(*events: Message) -> Callable[[], None]:
            def speak() -> None:
                for event in events if spare.alive and not spare.called else ():
                    self.world.tell_agent(node_id, event)

            return speak

        self.world.later(0.01, "spare starts", say(MemberStarted(member_id=who, node_id=node_id, pid=1)))
        # A faulty script in a spare might send these messages. They must never reach the controller.
        noise = (
            SessionOpened(member_id=who, generation=generation, step=0, root="/elsewhere", live=True),
            StepReached(member_id=who, generation=generation, step=99),
        )
        waits = SpareWaits(member_id=who, ready=self.world.rng.random() < 0.7)
        self.world.later(self.world.jitter(*BUILT_S), "spare waits", say(*noise, waits))

    def _call(self, call: CallSpare) -> None:
        spare = self._all[call.spare]
        if spare.called:
            raise Violation("a_spare_is_called_once", f"{call.spare} for {call.order.members}")
        if not spare.alive:
            self.world.spawn(spare.node_id, call.order, self.world.jitter(0.005, 0.03))
            return
        spare.called = True
        self.calls += 1
        self.world.spawn(spare.node_id, call.order, 0.001)

    def _die(self, spare: SimSpare) -> None:
        if not spare.alive or spare.called:
            return
        spare.alive = False
        exited = MemberExited(
            member_id=spare.order.member_id,
            node_id=spare.node_id,
            generation=spare.order.generation,
            code=None,
            signal=9,
            state="starting",
            step=0,
        )
        self.world.later(0.001, "spare exited", lambda: self.world.tell_agent(spare.node_id, exited))
