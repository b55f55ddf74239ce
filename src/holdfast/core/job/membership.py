"""Who belongs to the job: members, their seats, and which messages are too old to count.

Theory. A *member* is one process life and keeps its rank for life; a *roster* is the set of members that one
generation seats. The roster outlives its members: what a dead one left on its status page still counts in the
next decision. Ranks and member ids are related here and nowhere else.

Invariants:
1. A roster seats each rank at most once, and a member id is never seated twice.
2. ``is_stale`` is the one test that refuses messages of older generations.
3. Layouts are kept by rank across restarts of the same world, so a fault right after a restart finds them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, KeysView, Mapping, Sequence
from itertools import islice
from operator import itemgetter
from typing import NamedTuple

import msgspec

from holdfast.core.ids import (
    EVERYBODY,
    NO_GENERATION,
    NO_VERSION,
    Generation,
    LayoutVersion,
    MemberId,
    NodeId,
)
from holdfast.core.protocol.layout_messages import Layout, Layouts
from holdfast.core.protocol.messages import (
    Assignment,
    Catalogued,
    Finished,
    LayoutPublished,
    MemberExited,
    RankState,
    WorkerFailed,
)
from holdfast.errors import InternalError


def is_stale(message_generation: Generation, current: Generation) -> bool:
    """True when a message of ``message_generation`` must be refused by someone who is in ``current``."""
    return message_generation < current


class Member(msgspec.Struct, kw_only=True):
    """One process life, as the controller knows it."""

    member_id: MemberId
    rank: int
    local_rank: int
    node_id: NodeId
    pid: int = 0
    alive: bool = True
    started: bool = False  # its agent says that the process exists
    started_s: float = 0.0  # since then, on the controller's clock
    said_hello: bool = False
    opened_step: int | None = None  # its session stands or stood there at start
    reached: bool = False  # has committed a step in the current generation
    begun: bool = False  # has done its first step, or is about to
    live: bool = False  # its session can go on beside newcomers
    joining: bool = False  # a newcomer that does not hold its state yet: no member of the generation so far
    asked: bool = False  # a newcomer waits for its state
    finished: Finished | None = None
    failed: WorkerFailed | None = None  # its user code raised: the process is about to exit
    may_end: bool = False  # it was told that nobody needs what it holds
    exited: MemberExited | None = None
    kill_reason: str = ""  # we ordered its death
    given_up: bool = False  # it was killed and is still there: its agent is asked for what its page says
    hung_at_s: float = 0.0  # because it hangs, since then
    hung_in: str = ""  # where, when its own code is the reason
    is_excused: bool = False  # its death was ordered because of somebody else's fault
    state: RankState = "starting"
    step: int = 0

    @property
    def stays(self) -> bool:
        """Its user code raised, but the process keeps the state until it is told to go."""
        return self.failed is not None and self.failed.stays and not self.may_end


class PublishedLayout(NamedTuple):
    """The newest layout of one rank."""

    version: LayoutVersion
    layout: Layout
    by_itself: bool  # the rank has told it to this controller


class Roster:
    """The members of one generation, the dead included, and the layouts by rank."""

    def __init__(self) -> None:
        self.generation = NO_GENERATION
        self._members: dict[MemberId, Member] = {}
        self._ranks: dict[int, MemberId] = {}
        self._sorted: list[Member] | None = None  # by rank, made at need
        self._living: list[Member] | None = None
        self._homes: dict[NodeId, list[Member]] | None = None  # the living by node
        self._dead: list[Member] | None = None
        self.layouts: dict[int, PublishedLayout] = {}
        self._tables: dict[bytes, bytes] = {}  # one object for equal ones
        self._versions: Counter[LayoutVersion] = Counter()  # of the layouts
        self.catalogued = NO_VERSION  # the newest version whose catalogue was sent
        self._layouts: Layouts | None = None  # of all, made at need: each newcomer is told it
        self._recalled = NO_VERSION  # the last one that was recalled

    def seat(self, generation: Generation, members: Iterable[Member]) -> None:
        """Replace all members."""
        self.generation = generation
        self._members = {}
        self._ranks = {}
        for member in members:
            self.add(member)

    def add(self, member: Member) -> None:
        """Seat one more member.

        Raises:
            InternalError: its rank or its id is taken.
        """
        if member.member_id in self._members or self._ranks.get(member.rank) in self._members:
            raise InternalError(f"rank {member.rank} or member {member.member_id} is seated already")
        self._members[member.member_id] = member
        self._ranks[member.rank] = member.member_id
        self._sorted = self._living = self._homes = self._dead = None

    def bury(self, member: Member, exited: MemberExited) -> None:
        """Its process is gone."""
        homes = self._by_node()  # made of the living, this one included
        place = bisect_left(self.living, member.rank, key=lambda m: m.rank)
        self._living = [*self.living[:place], *self.living[place + 1 :]]
        homes[member.node_id] = [m for m in homes[member.node_id] if m is not member]
        if not homes[member.node_id]:
            del homes[member.node_id]
        member.alive, member.exited = False, exited
        self._dead = None

    def reseat(self, member: Member) -> None:
        """Give the seat of a dead member to its replacement.

        Raises:
            InternalError: the one who has it lives.
        """
        before = self.at(member.rank)
        assert before is not None
        if before.alive:
            raise InternalError(f"rank {member.rank} is replaced while member {before.member_id} lives")
        del self._members[before.member_id]
        self.add(member)

    def get(self, member_id: MemberId) -> Member | None:
        """The member, or None when it does not belong to this roster."""
        return self._members.get(member_id)

    def at(self, rank: int) -> Member | None:
        """Who has the seat of ``rank``, dead or alive."""
        member_id = self._ranks.get(rank)
        return None if member_id is None else self._members[member_id]

    @property
    def members(self) -> list[Member]:
        """All members by rank. Every event asks, so the list is kept; it is not for changing."""
        if self._sorted is None:
            self._sorted = sorted(self._members.values(), key=lambda m: m.rank)
        return self._sorted

    @property
    def living(self) -> list[Member]:
        """Members whose process exists, by rank; not for changing."""
        if self._living is None:
            self._living = [m for m in self.members if m.alive]
        return self._living

    @property
    def dead(self) -> list[Member]:
        """Members whose process is gone, by rank; not for changing."""
        if self._dead is None:
            self._dead = [m for m in self.members if not m.alive]
        return self._dead

    def on_node(self, node_id: NodeId) -> list[Member]:
        """Living members of one node, by rank; not for changing."""
        return self._by_node().get(node_id, [])

    @property
    def nodes(self) -> KeysView[NodeId]:
        """Where members live; every node's messages ask."""
        return self._by_node().keys()

    def _by_node(self) -> dict[NodeId, list[Member]]:
        if self._homes is None:
            self._homes = {}
            for member in self.living:
                self._homes.setdefault(member.node_id, []).append(member)
        return self._homes

    def publish(self, layout: LayoutPublished, world_size: int) -> Layouts | None:
        """Keep a layout; all layouts when it completes a version.

        Also when its rank says the same again: what it was told may have died with its agent.
        """
        before = self.layouts.get(layout.rank)
        again = before is not None and before.by_itself and before.version == layout.version
        self._keep(layout.rank, layout.version, layout.layout, by_itself=True)
        if self.agreed(world_size) == NO_VERSION or (layout.version == self.catalogued and not again):
            return None
        self.catalogued = layout.version
        return self.all_layouts()

    def agreed(self, world_size: int) -> LayoutVersion:
        """The version that all layouts are of; NO_VERSION while a rank has told another one, or none."""
        version, ranks = max(self._versions.items(), key=itemgetter(1), default=(NO_VERSION, 0))
        return version if ranks == world_size else NO_VERSION

    def recall(self, catalogued: Catalogued, world_size: int) -> None:
        """What an earlier controller sent to all ranks: layouts of ranks that can no longer publish theirs. One of
        another number of ranks is from before the job was resized."""
        if len(catalogued.layouts.ranks) != world_size:
            return
        if catalogued.version != self._recalled:  # every agent has it, and it is as large as the job
            self._recalled = catalogued.version
            for rank, layout in catalogued.layouts.by_rank().items():
                if rank not in self.layouts:
                    self._keep(rank, catalogued.version, layout, by_itself=False)
        if catalogued.member_id == EVERYBODY:  # else one worker has it
            self.catalogued = max(self.catalogued, catalogued.version)

    def _keep(self, rank: int, version: LayoutVersion, layout: Layout, *, by_itself: bool) -> None:
        table = self._tables.setdefault(layout.table, layout.table)
        before = self.layouts.get(rank)
        if before is not None:
            self._versions[before.version] -= 1
            self._versions += Counter()  # without those of nobody
        self._versions[version] += 1
        told = PublishedLayout(version, Layout(layout.own, table), by_itself)
        if before is None or before.layout != told.layout:
            self._layouts = None
        self.layouts[rank] = told

    def all_layouts(self) -> Layouts:
        """The newest layout of each rank; not for changing."""
        if self._layouts is None:
            self._layouts = Layouts.of({rank: told.layout for rank, told in sorted(self.layouts.items())})
        return self._layouts

    def forget_layouts(self) -> None:
        """The job has another number of ranks: what was said of the one before is of no use."""
        self.layouts, self._tables, self._versions = {}, {}, Counter()
        self._layouts, self._recalled = None, NO_VERSION

    def check(self) -> None:
        """Raise InternalError when an invariant is broken."""
        ranks = [m.rank for m in self.members]
        if len(set(ranks)) != len(ranks):
            raise InternalError(f"two members share a rank: {ranks}")
        for member in self.members:
            if member.alive == (member.exited is not None):
                raise InternalError(f"member {member.member_id}: alive={member.alive} with {member.exited}")


def node_order(node_id: NodeId) -> tuple[int, str]:
    """Nodes in the order of their numbers: node2 before node10."""
    return len(node_id), node_id


def place_alone(node_id: NodeId) -> int:
    """The place of an agent that is alone, from 1, for ``Config.alone``.

    It follows from the name alone: sides that are cut off know different electorates. With one place for two of them
    their generations would be equal, and so the names of their checkpoints.

    Example:
        >>> place_alone(NodeId("node3"))
        4
    """
    digits = node_id[len(node_id.rstrip("0123456789")) :]
    return 1 + int(digits or 0)


def assign(
    slots: Sequence[tuple[NodeId, int]],
    world_size: int,
    first_member: int,
    before: Mapping[int, NodeId] | None = None,
) -> dict[NodeId, tuple[Assignment, ...]]:
    """Seat ``world_size`` ranks on nodes of the given numbers of slots, filling node after node.

    Args:
        before: where ranks were: who can stay stays, so a spare node takes the place of a lost one.

    Returns:
        Assignments per node; empty when the slots do not suffice.
    """
    if sum(count for _, count in slots) < world_size:
        return {}
    free = dict(slots)
    ranks: dict[NodeId, list[int]] = {node_id: [] for node_id in free}
    homeless: list[int] = []
    for rank in range(world_size):
        node_id = (before or {}).get(rank)
        if node_id is not None and free.get(node_id, 0) > 0:
            free[node_id] -= 1
            ranks[node_id].append(rank)
        else:
            homeless.append(rank)
    rest = iter(homeless)
    for node_id, count in free.items():
        ranks[node_id] += islice(rest, count)
    return {
        node_id: tuple(
            Assignment(MemberId(first_member + rank), rank, i) for i, rank in enumerate(sorted(here))
        )
        for node_id, here in ranks.items()
        if here
    }
