"""The members of the job, their seats, and the test for messages that are too old.

Theory. A *member* is one life of a process and keeps its rank for this life. A *roster* is the set of members that one
generation seats. The roster outlives its members: the status page of a dead member still counts in the next decision.
Ranks and member ids are related in this module and nowhere else.

Invariants:
1. A roster seats each rank at most once, and a member id is never seated twice.
2. ``is_stale`` is the one test that refuses messages of older generations.
3. Layouts are kept by rank across restarts with the same number of ranks, so a fault right after a restart finds them.
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
    """Return True if a receiver in generation ``current`` must refuse a message of ``message_generation``."""
    return message_generation < current


class Member(msgspec.Struct, kw_only=True):
    """One life of a worker process, as the controller knows it."""

    member_id: MemberId
    rank: int
    local_rank: int
    node_id: NodeId
    pid: int = 0
    alive: bool = True
    started: bool = False  # its agent has reported that the process exists
    started_s: float = 0.0  # time of that report on the controller's clock
    said_hello: bool = False
    opened_step: int | None = None  # step at which its session started
    reached: bool = False  # has committed a step in the current generation
    begun: bool = False  # has done its first step, or is about to
    live: bool = False  # its session can continue beside newcomers
    joining: bool = False  # a newcomer without its state: not yet a member of the generation
    asked: bool = False  # a newcomer that waits for its state
    finished: Finished | None = None
    failed: WorkerFailed | None = None  # its user code raised: the process is about to exit
    may_end: bool = False  # it was released: no process needs its state
    exited: MemberExited | None = None
    kill_reason: str = ""  # why the controller ordered its death; empty: it did not
    given_up: bool = False  # it survived SIGKILL: its agent is asked for its status page
    hung_at_s: float = 0.0  # time since which it hangs, if that is why it was killed
    hung_in: str = ""  # position of the hang, if code of this process is the cause
    is_excused: bool = False  # its death was ordered because of another member's fault
    state: RankState = "starting"
    step: int = 0

    def report(self, state: RankState, step: int) -> None:
        """Record the state and the step that the member has reported."""
        self.state, self.step = state, step

    def commit(self, step: int) -> None:
        """Record that the member has committed a step in the current generation, and is now at ``step``."""
        self.reached = True
        self.report("ready", step)

    def resume(self) -> None:
        """Record that the member continues in a new generation, in which it has committed no step yet."""
        self.reached = False

    def condemn(
        self, reason: str, *, excused: bool = False, hung_at_s: float = 0.0, hung_in: str = ""
    ) -> None:
        """Record why the death of the member is ordered or assumed.

        ``excused``: another member caused the fault. ``hung_at_s``, ``hung_in``: since when and where it hangs.
        """
        self.kill_reason = self.kill_reason or reason
        self.is_excused = self.is_excused or excused
        self.hung_at_s, self.hung_in = hung_at_s or self.hung_at_s, hung_in or self.hung_in

    @property
    def stays(self) -> bool:
        """True if user code of this member raised, and its process keeps the state until it receives ``Release``."""
        return self.failed is not None and self.failed.stays and not self.may_end


class PublishedLayout(NamedTuple):
    """The newest layout of one rank, and whether the rank itself has sent it to this controller."""

    version: LayoutVersion
    layout: Layout
    by_itself: bool  # the rank has sent the layout to this controller; False: an earlier controller had it


class Roster:
    """The members of one generation, including the dead ones, and the layouts by rank."""

    def __init__(self) -> None:
        self.generation = NO_GENERATION
        self.adopting = False  # the agents have not listed all members that an earlier controller has seated
        self._members: dict[MemberId, Member] = {}
        self._ranks: dict[int, MemberId] = {}
        self._sorted: list[Member] | None = None  # by rank, computed on demand
        self._living: list[Member] | None = None
        self._homes: dict[NodeId, list[Member]] | None = None  # the living by node
        self._dead: list[Member] | None = None
        self.layouts: dict[int, PublishedLayout] = {}
        self._tables: dict[bytes, bytes] = {}  # one object for equal tables
        self._versions: Counter[LayoutVersion] = Counter()  # number of layouts of each version
        self.catalogued = NO_VERSION  # the newest version whose catalogue was sent
        self._layouts: Layouts | None = None  # layouts of all ranks for newcomers, computed on demand
        self._recalled = NO_VERSION  # the last version that ``recall`` has taken over

    def seat(self, generation: Generation, members: Iterable[Member]) -> None:
        """Replace all members by ``members`` of a new generation."""
        self.generation = generation
        self._members = {}
        self._ranks = {}
        for member in members:
            self.add(member)

    def add(self, member: Member) -> None:
        """Seat one more member.

        Raises:
            InternalError: the rank or the id of the member is taken.
        """
        if member.member_id in self._members or self._ranks.get(member.rank) in self._members:
            raise InternalError(f"rank {member.rank} or member {member.member_id} is seated already")
        self._members[member.member_id] = member
        self._ranks[member.rank] = member.member_id
        self._sorted = self._living = self._homes = self._dead = None

    def renew(self, generation: Generation) -> None:
        """Move all members to a newer generation, in the same seats."""
        self.generation = generation

    def lose_memory(self, node_id: NodeId) -> None:
        """Record the loss of the states that dead members of this node left in its memory."""
        for member in self.members:
            if member.node_id == node_id and member.exited is not None:
                member.exited = msgspec.structs.replace(member.exited, kept=())

    def bury(self, member: Member, exited: MemberExited) -> None:
        """Record that the process of a member has ended. ``exited``: the report of its agent."""
        homes = self._by_node()  # computed from the living members, this member included
        place = bisect_left(self.living, member.rank, key=lambda m: m.rank)
        self._living = [*self.living[:place], *self.living[place + 1 :]]
        homes[member.node_id] = [m for m in homes[member.node_id] if m is not member]
        if not homes[member.node_id]:
            del homes[member.node_id]
        member.alive, member.exited = False, exited
        self._dead = None

    def reseat(self, member: Member) -> None:
        """Give the seat of a dead member to its replacement ``member``.

        Raises:
            InternalError: the member that has the seat lives.
        """
        before = self.at(member.rank)
        assert before is not None
        if before.alive:
            raise InternalError(f"rank {member.rank} is replaced while member {before.member_id} lives")
        del self._members[before.member_id]
        self.add(member)

    def get(self, member_id: MemberId) -> Member | None:
        """Return the member with this id, or None if it does not belong to this roster."""
        return self._members.get(member_id)

    def at(self, rank: int) -> Member | None:
        """Return the member in the seat of ``rank``, dead or alive; None if the seat is empty."""
        member_id = self._ranks.get(rank)
        return None if member_id is None else self._members[member_id]

    @property
    def members(self) -> list[Member]:
        """All members by rank. The list is cached, because every event reads it: do not change it."""
        if self._sorted is None:
            self._sorted = sorted(self._members.values(), key=lambda m: m.rank)
        return self._sorted

    @property
    def living(self) -> list[Member]:
        """Members whose process exists, by rank. Do not change the list."""
        if self._living is None:
            self._living = [m for m in self.members if m.alive]
        return self._living

    @property
    def dead(self) -> list[Member]:
        """Members whose process has ended, by rank. Do not change the list."""
        if self._dead is None:
            self._dead = [m for m in self.members if not m.alive]
        return self._dead

    def on_node(self, node_id: NodeId) -> list[Member]:
        """Return the living members of one node, by rank. Do not change the list."""
        return self._by_node().get(node_id, [])

    @property
    def nodes(self) -> KeysView[NodeId]:
        """The nodes that have living members."""
        return self._by_node().keys()

    def _by_node(self) -> dict[NodeId, list[Member]]:
        if self._homes is None:
            self._homes = {}
            for member in self.living:
                self._homes.setdefault(member.node_id, []).append(member)
        return self._homes

    def publish(self, layout: LayoutPublished, world_size: int) -> Layouts | None:
        """Keep the layout that a rank has published.

        Returns:
            The layouts of all ranks in two cases: all of them now have the version of this layout for the first time,
            or the rank has sent the layout again, because the answer may have been lost with an agent. Otherwise None.
        """
        before = self.layouts.get(layout.rank)
        again = before is not None and before.by_itself and before.version == layout.version
        self._keep(layout.rank, layout.version, layout.layout, by_itself=True)
        if self.agreed(world_size) == NO_VERSION or (layout.version == self.catalogued and not again):
            return None
        self.catalogued = layout.version
        return self.all_layouts()

    def agreed(self, world_size: int) -> LayoutVersion:
        """Return the version that all layouts have; NO_VERSION if a layout is missing or has another version."""
        version, ranks = max(self._versions.items(), key=itemgetter(1), default=(NO_VERSION, 0))
        return version if ranks == world_size else NO_VERSION

    def recall(self, catalogued: Catalogued, world_size: int) -> None:
        """Take over layouts that an earlier controller sent, for ranks without a layout at this controller.

        Layouts of another number of ranks are left out: they are from before the job was resized.
        """
        if len(catalogued.layouts.ranks) != world_size:
            return
        if catalogued.version != self._recalled:  # every agent sends it, and it is as large as the job
            self._recalled = catalogued.version
            for rank, layout in catalogued.layouts.by_rank().items():
                if rank not in self.layouts:
                    self._keep(rank, catalogued.version, layout, by_itself=False)
        if catalogued.member_id == EVERYBODY:  # otherwise only one worker has this catalogue
            self.catalogued = max(self.catalogued, catalogued.version)

    def _keep(self, rank: int, version: LayoutVersion, layout: Layout, *, by_itself: bool) -> None:
        table = self._tables.setdefault(layout.table, layout.table)
        before = self.layouts.get(rank)
        if before is not None:
            self._versions[before.version] -= 1
            self._versions += Counter()  # drop the versions that no layout has
        self._versions[version] += 1
        told = PublishedLayout(version, Layout(layout.own, table), by_itself)
        if before is None or before.layout != told.layout:
            self._layouts = None
        self.layouts[rank] = told

    def all_layouts(self) -> Layouts:
        """Return the newest layout of each rank. Do not change the returned value."""
        if self._layouts is None:
            self._layouts = Layouts.of({rank: told.layout for rank, told in sorted(self.layouts.items())})
        return self._layouts

    def forget_layouts(self) -> None:
        """Forget all layouts: the job has another number of ranks now, for which they are of no use."""
        self.layouts, self._tables, self._versions = {}, {}, Counter()
        self._layouts, self._recalled = None, NO_VERSION

    def check(self) -> None:
        """Raise InternalError if two members share a rank, or a member is both alive and ended."""
        ranks = set[int]()
        for member in self.members:
            ranks.add(member.rank)
            if member.alive == (member.exited is not None):
                raise InternalError(f"member {member.member_id}: alive={member.alive} with {member.exited}")
        if len(ranks) != len(self.members):
            raise InternalError(f"two members share a rank: {[member.rank for member in self.members]}")


def node_order(node_id: NodeId) -> tuple[int, str]:
    """Return the sort key that orders nodes by number: node2 before node10."""
    return len(node_id), node_id


def place_alone(node_id: NodeId) -> int:
    """Return the value of ``Config.alone`` for a node whose controller decides without a majority: its number, from 1.

    The number follows from the name only, because nodes that are cut off from each other may know different
    electorates. If two such nodes had one number, their generations and the names of their checkpoints would be equal.

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
    """Seat ``world_size`` ranks on nodes with the given numbers of slots, filling node after node.

    Args:
        slots: nodes and their numbers of slots.
        world_size: the number of ranks.
        first_member: the member id of rank 0; the ids of the other ranks follow.
        before: the node that each rank had. A rank stays on its node if possible, so a spare node gets the ranks of a
            lost node.

    Returns:
        The assignments of each node; empty if there are not enough slots.
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
