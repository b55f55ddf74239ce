"""Spares: processes of one node that were built in advance, and become ranks when ranks are lost.

Theory. A spare makes the start of a newcomer fast. Only the agent of its node knows the spare. To the controller, a
spare that was called is an ordinary newcomer that starts fast. Before the call a spare belongs to no generation. Its
member id is below zero: no other process has it, and no message to the controller names it.

A script may ask for its rank before it opens its session. With fewer spares than workers a spare must fit every rank.
So it waits where its script first asks for the rank (``held``). If the script does not ask, the spare is built up to
its first step (``ready``). If there are as many spares as workers, each spare is built for one rank. It becomes ready
even if its script asks for the rank. The memory of a device belongs to the rank that trains on it. So every spare is
held before its first use of a device.

The shell in this module is the code of the agent process that starts and signals processes.

Invariants:
1. A spare is not a member: none of its messages leaves the node, it is in no roster, votes in no step and serves no
   state.
2. A spare is called once, for one seat.
3. Spares are built only while every worker of the node trains, never during a recovery.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

from holdfast.core.config import AgentConfig
from holdfast.core.ids import Generation, MemberId, NodeId
from holdfast.core.protocol.health_messages import Late
from holdfast.core.protocol.messages import (
    Assignment,
    Command,
    KillMember,
    LogRecord,
    MemberExited,
    MemberStarted,
    Message,
    Send,
    SetTimer,
    StartMembers,
    WorkerFailed,
)
from holdfast.core.protocol.notices import PrepareSeats, SeatsPrepared
from holdfast.text import plural

ANY_RANK = -1
SPARE_TIMER = "spares"
NUMBERS_PER_AGENT = 1 << 16

SpareState = Literal["building", "held", "ready"]


def is_spare(member_id: int) -> bool:
    """Return True if ``member_id`` is the id of a spare that was not called."""
    return member_id < 0


# ---------------------------------------------------------------- messages between a spare and its agent


class SpareWaits(Message, frozen=True):
    """Report that a spare waits to be called.

    The spare waits at its first step (``ready``), or where its script needed its rank or a device.
    """

    member_id: MemberId
    ready: bool


class Called(Message, frozen=True):
    """Order to a spare to become the member ``member_id``.

    ``env`` replaces the placeholder environment of the spare. ``log`` is its log file. ``ending`` holds the ids of lost
    processes of this node that still occupy memory or devices.
    """

    member_id: MemberId
    generation: Generation
    rank: int
    local_rank: int
    world_size: int
    env: dict[str, str]
    log: str
    ending: tuple[int, ...] = ()


class BuildSpare(Message, frozen=True):
    """Command to the shell to start a spare. ``rank`` is ANY_RANK if the spare must fit every rank."""

    member_id: MemberId
    generation: Generation
    world_size: int
    rank: int
    local_rank: int


class CallSpare(Message, frozen=True):
    """Command to the shell to turn a spare into the only member in ``order``.

    If that fails, the shell starts the member as a new process.
    """

    spare: MemberId
    order: StartMembers


# ---------------------------------------------------------------- state machine


class Spare(msgspec.Struct, kw_only=True):
    """The state of one spare that was not called."""

    member_id: MemberId
    rank: int
    world_size: int
    state: SpareState = "building"
    why: str = ""  # the exception that ended its script
    local_rank: int = ANY_RANK
    reserved: bool = False  # the spare is kept for a rank that will move to this node


class Spares:
    """The spares of one node, a part of :class:`~holdfast.core.agent.Agent`. It appends to the agent's commands."""

    def __init__(self, config: AgentConfig, out: list[Command]) -> None:
        self.config = config
        self.living: dict[MemberId, Spare] = {}
        self.world_size = config.world_size
        self._out = out
        self._made = 0
        self._failures = 0  # consecutive builds that failed
        self._given_up = False
        self._fixed = config.spares >= config.slots  # one spare for every rank of the node

    def fit(self, world_size: int) -> None:
        """Set the number of ranks of the job. Kill the spares that were built for another number of ranks."""
        self.world_size = world_size
        for spare in [s for s in self.living.values() if s.world_size != world_size]:
            del self.living[spare.member_id]
            self._kill(spare, f"was built for {plural(spare.world_size, 'rank')}")

    def top_up(self, generation: Generation, ranks: Sequence[int]) -> None:
        """Build the missing spares. Nothing is built unless all workers of the node are training.

        Args:
            generation: the generation of the workers.
            ranks: the ranks of the workers of this node that have done a step.
        """
        if self._given_up or len(ranks) != self.config.slots:
            return
        wanted = min(self.config.spares, self.config.slots) if self._fixed else self.config.spares
        own = [spare for spare in self.living.values() if not spare.reserved]
        taken = {spare.rank for spare in own}
        free = [(rank, place) for place, rank in enumerate(sorted(ranks)) if rank not in taken]
        for _ in range(wanted - len(own)):
            rank, local_rank = free.pop(0) if self._fixed else (ANY_RANK, len(ranks) - 1)
            self._build(generation, rank, local_rank)

    def _build(self, generation: Generation, rank: int, local_rank: int, *, reserved: bool = False) -> None:
        self._made += 1
        member_id = MemberId(-(self.config.pid * NUMBERS_PER_AGENT + self._made))
        self.living[member_id] = Spare(
            member_id=member_id,
            rank=rank,
            world_size=self.world_size,
            local_rank=local_rank,
            reserved=reserved,
        )
        order = BuildSpare(
            member_id=member_id,
            generation=generation,
            world_size=self.world_size,
            rank=rank,
            local_rank=local_rank,
        )
        self._out.append(Send(to="shell", message=order))
        self._record("spare_building", member_id=int(member_id), rank=rank)

    def prepare(self, order: PrepareSeats) -> None:
        """Build a spare for each rank that will move to this node. Report when all of these spares wait to be called.

        Spares of an earlier order are killed if they are no longer needed.
        """
        if order.members:
            self.fit(order.world_size)
        wanted = {(seat.rank, seat.local_rank) for seat in order.members}
        for spare in [s for s in self.living.values() if s.reserved]:
            if (spare.rank, spare.local_rank) in wanted:
                wanted.discard((spare.rank, spare.local_rank))
            else:
                del self.living[spare.member_id]
                self._kill(spare, f"rank {spare.rank} does not move here")
        for rank, local_rank in sorted(wanted):
            self._build(order.generation, rank, local_rank, reserved=True)
        if order.members and not wanted:
            self._tell_prepared()

    def _tell_prepared(self, failed: str = "") -> None:
        waits = (s.rank for s in self.living.values() if s.reserved and s.state != "building")
        node_id = NodeId(self.config.node_id)
        said = SeatsPrepared(node_id=node_id, ranks=tuple(sorted(waits)), failed=failed)
        self._out.append(Send(to="controller", message=said))

    def take(self, seat: Assignment) -> MemberId | None:
        """Choose the best spare that fits ``seat``: a ``ready`` spare before a ``held`` one.

        Remove the spare from the list of living spares, and return its id; None if no spare fits.
        """
        fit = [
            spare
            for spare in self.living.values()
            if spare.state != "building"
            and spare.rank in (ANY_RANK, seat.rank)
            and not (spare.reserved and spare.local_rank != seat.local_rank)
        ]
        if not fit:
            return None
        best = max(fit, key=lambda s: (s.state == "ready", s.member_id))
        del self.living[best.member_id]
        self._record(
            "spare_called",
            member_id=int(best.member_id),
            state=best.state,
            rank=seat.rank,
            becomes=int(seat.member_id),
        )
        return best.member_id

    def heard(self, event: Message) -> None:
        """Handle a message from a spare or about one. Messages of other kinds are dropped."""
        spare = self.living.get(getattr(event, "member_id", MemberId(0)))
        if spare is None:
            return
        if isinstance(event, SpareWaits):
            spare.state = "ready" if event.ready else "held"
            self._failures = 0
            self._record("spare_waits", member_id=int(spare.member_id), state=spare.state)
            if spare.reserved:
                self._tell_prepared()
        elif isinstance(event, WorkerFailed):
            spare.why = f"{event.kind}: {event.what}"
        elif isinstance(event, Late):
            what = "is stopped" if event.stopped else "shows no progress"
            spare.why = f"it {what}, for {event.idle_s:.1f} s"
            self._kill(spare, spare.why)
        elif isinstance(event, MemberExited):
            self._exited(spare, event)
        elif isinstance(event, MemberStarted):
            self._record("spare_started", member_id=int(spare.member_id), pid=event.pid)

    def _exited(self, spare: Spare, event: MemberExited) -> None:
        del self.living[spare.member_id]
        how = f"signal {event.signal}" if event.signal else f"code {event.code}"
        self._record("spare_gone", member_id=int(spare.member_id), state=spare.state, how=how, why=spare.why)
        if spare.reserved:
            self._tell_prepared(spare.why or how)
            return
        self._failures += spare.state == "building"
        if self._failures >= self.config.spare_failures_max:
            self._given_up = True
            self._record("spares_given_up", failures=self._failures, why=spare.why or how)
            return
        delay_s = self.config.spare_delay_s * 2**self._failures
        self._out.append(SetTimer(name=SPARE_TIMER, delay_s=delay_s))

    def _kill(self, spare: Spare, reason: str) -> None:
        kill = KillMember(member_id=spare.member_id, node_id=NodeId(self.config.node_id), reason=reason)
        self._out.append(Send(to="shell", message=kill))

    def _record(self, kind: str, /, **data: str | int) -> None:
        self._out.append(LogRecord(kind=kind, data={**data, "node": self.config.node_id}))
