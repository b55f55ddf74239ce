"""Spares: processes of one node that were built beforehand, and become a rank when one is lost.

Theory. A spare is a way to start a newcomer, known to the agent of its node alone: to the controller the process that
is called is an ordinary newcomer that starts very fast. Until then it belongs to no generation. It carries a member id
below zero, which nobody else has and which no message to the controller ever names.

A script may ask for its rank before it opens its session. With fewer spares than workers a spare must fit every rank,
so it waits where its script first asks (``held``); one that does not ask is built up to its first step (``ready``).
With as many spares as workers each one is built as one rank, and is ready whatever its script asks. The memory of a
device is that of the rank that trains on it: any spare is held before its first use of one.

Invariants:
1. A spare is nobody: nothing that it says leaves the node, it is in no roster, votes in no step and serves no state.
2. A spare is called once, for one seat.
3. Spares are built only while every worker of the node trains: never beside a recovery.
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
from holdfast.text import plural

ANY_RANK = -1
SPARE_TIMER = "spares"
NUMBERS_PER_AGENT = 1 << 16

SpareState = Literal["building", "held", "ready"]


def is_spare(member_id: int) -> bool:
    """True for the id of a spare that was not called."""
    return member_id < 0


# ---------------------------------------------------------------- messages between a spare and its agent


class SpareWaits(Message, frozen=True):
    """A spare waits to be called: ``ready`` at its first step, else where its script needed its rank or a device."""

    member_id: MemberId
    ready: bool


class Called(Message, frozen=True):
    """To a spare: you are this member from now on. ``env`` replaces its stand-in's, ``log`` is where it writes.

    ``ending``: processes of this node that were lost, and still have memory or devices.
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
    """The shell starts a spare; ``rank`` is ANY_RANK when it must fit every one."""

    member_id: MemberId
    generation: Generation
    world_size: int
    rank: int
    local_rank: int


class CallSpare(Message, frozen=True):
    """The shell lets a spare be the one member of ``order``; if it cannot, it starts that member as usual."""

    spare: MemberId
    order: StartMembers


# ---------------------------------------------------------------- machine


class Spare(msgspec.Struct, kw_only=True):
    """One spare."""

    member_id: MemberId
    rank: int
    world_size: int
    state: SpareState = "building"
    why: str = ""  # the exception that ended its script


class Spares:
    """Part of :class:`~holdfast.core.agent.Agent`; appends to its commands."""

    def __init__(self, config: AgentConfig, out: list[Command]) -> None:
        self.config = config
        self.living: dict[MemberId, Spare] = {}
        self.world_size = config.world_size
        self._out = out
        self._made = 0
        self._failures = 0  # in a row
        self._given_up = False
        self._fixed = config.spares >= config.slots  # one for every rank of the node

    def fit(self, world_size: int) -> None:
        """The job has this many ranks from now on: spares that were built for another number are of no use."""
        self.world_size = world_size
        for spare in [s for s in self.living.values() if s.world_size != world_size]:
            del self.living[spare.member_id]
            self._kill(spare, f"was built for {plural(spare.world_size, 'rank')}")

    def top_up(self, generation: Generation, ranks: Sequence[int]) -> None:
        """Build what is missing. ``ranks``: of the workers of this node; nothing is built unless all are there."""
        if self._given_up or len(ranks) != self.config.slots:
            return
        wanted = min(self.config.spares, self.config.slots) if self._fixed else self.config.spares
        taken = {spare.rank for spare in self.living.values()}
        free = [(rank, place) for place, rank in enumerate(sorted(ranks)) if rank not in taken]
        for _ in range(wanted - len(self.living)):
            rank, local_rank = free.pop(0) if self._fixed else (ANY_RANK, len(ranks) - 1)
            self._made += 1
            member_id = MemberId(-(self.config.pid * NUMBERS_PER_AGENT + self._made))
            self.living[member_id] = Spare(member_id=member_id, rank=rank, world_size=self.world_size)
            order = BuildSpare(
                member_id=member_id,
                generation=generation,
                world_size=self.world_size,
                rank=rank,
                local_rank=local_rank,
            )
            self._out.append(Send(to="shell", message=order))
            self._record("spare_building", member_id=int(member_id), rank=rank)

    def take(self, seat: Assignment) -> MemberId | None:
        """The spare that becomes the member of ``seat``, the one that is built furthest; None: there is none."""
        fit = [s for s in self.living.values() if s.state != "building" and s.rank in (ANY_RANK, seat.rank)]
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
        """Something about a spare, or from it; what else it says is nobody's business."""
        spare = self.living.get(getattr(event, "member_id", MemberId(0)))
        if spare is None:
            return
        if isinstance(event, SpareWaits):
            spare.state = "ready" if event.ready else "held"
            self._failures = 0
            self._record("spare_waits", member_id=int(spare.member_id), state=spare.state)
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
        self._failures += spare.state == "building"
        how = f"signal {event.signal}" if event.signal else f"code {event.code}"
        self._record("spare_gone", member_id=int(spare.member_id), state=spare.state, how=how, why=spare.why)
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
