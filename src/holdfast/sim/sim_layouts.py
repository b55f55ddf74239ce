"""What a simulated rank holds, and what it knows of the others: the real ``core.worker.layout_agreement`` with layouts that drift.

A layout is one of a few contents, so that a rank also comes back to what it held before. Each rank's drifts on its own,
at any commit; a newcomer may lack what the one before it had.
"""

from __future__ import annotations

import random
from functools import cache
from typing import Protocol

from holdfast.core.ids import NO_VERSION, LayoutVersion, MemberId, SaveId
from holdfast.core.protocol.health_messages import CopyDigest, ranks_text
from holdfast.core.protocol.layout_messages import Layout, Layouts
from holdfast.core.protocol.messages import Catalogued, LayoutPublished, Message, Receive
from holdfast.core.worker.layout_agreement import LayoutAgreement, LayoutAnnouncement
from holdfast.core.worker.step import StepMachine
from holdfast.core.worker.vote import Ballot, Tally
from holdfast.sim.sim_store import SimStore

CATALOGUE_TIMEOUT_S = 15.0
CONTENTS = 3
CHANGES = 0.5  # per step, of all ranks together
NEWCOMERS_THAT_DIFFER = 0.3
FLIPPED = 100_003  # more than there are ranks: no sum of flipped copies, with their factors, is zero


@cache
def _text(ranks: range) -> str:
    """Thousands of ranks say the same."""
    return ranks_text(ranks)


class LayoutOwner(Protocol):
    """The rank."""

    member_id: MemberId
    rank: int
    machine: StepMachine

    def send(self, message: Message) -> None: ...


class LayoutScene(Protocol):
    """What it needs of the world. ``whims`` decide about changes only."""

    world_size: int
    store: SimStore
    whims: random.Random

    def catalogued(self, version: LayoutVersion, layouts: Layouts) -> None: ...
    def plans(self, save_id: SaveId, version: LayoutVersion, told: bool) -> None: ...


class SimLayouts:
    """Of one process life.

    Attributes:
        told: the machine of ``core.worker.layout_agreement``.
        have: the newest version whose catalogue has come.
    """

    def __init__(self, owner: LayoutOwner, world: LayoutScene) -> None:
        self.told = LayoutAgreement()
        self.have = NO_VERSION
        self._own = b"0"
        self._layouts = Layouts((), {})
        self._owner = owner
        self._world = world

    def look(self) -> None:
        """Tell what is held, when it is not what was told."""
        self._tell(self.told.note(Layout(self._own, b""), self._owner.machine.generation))

    def drift(self) -> None:
        """A step has ended: the state may have other tensors."""
        if self._world.whims.random() < CHANGES / self._world.world_size:
            self._change()
        self.look()

    def _change(self) -> None:
        self._own = b"%d" % self._world.whims.randrange(CONTENTS)

    def inherit(self, order: Receive) -> None:
        """A newcomer has got its state."""
        mine = order.layouts.by_rank()[self._owner.rank]
        if order.version != NO_VERSION:
            self._take(order.version, order.layouts)
        self._tell(self.told.inherit(order.version, mine))
        self._own = mine.own
        if self._world.whims.random() < NEWCOMERS_THAT_DIFFER:
            self._change()

    def ballot(self, said: Ballot) -> Ballot:
        """For the next vote."""
        return self.told.ballot(said, self._owner.machine.generation, self.have)

    def read(self, tally: Tally) -> None:
        """Of the last vote."""
        self._tell(self.told.read(tally))

    def catalogued(self, message: Catalogued) -> None:
        """Everyone's layouts."""
        self._take(message.version, message.layouts)

    def _take(self, version: LayoutVersion, layouts: Layouts) -> None:
        self._world.catalogued(version, layouts)
        if version > self.have:
            self.have, self._layouts = version, layouts

    def plan(self, save_id: SaveId) -> None:
        """A save is planned by what is known now."""
        told = self._layouts.ranks.get(str(self._owner.rank), (b"", 0))[0] == self._own
        self._world.plans(save_id, self.have, told)

    def _sharers(self) -> range:
        """Ranks that hold what this one holds."""
        shards = self._world.store.shards
        return range(self._owner.rank % shards, self._world.world_size, shards)

    def digest(self, differs: bool) -> int:
        """Of this rank's copy, times its factor."""
        sharers = self._sharers()
        return self._content(differs) * (1 - len(sharers) if self._owner.rank == sharers[0] else 1)

    def copy(self, differs: bool) -> CopyDigest:
        """What this rank says of its copy when it is asked."""
        return CopyDigest(_text(self._sharers()), "w", self._content(differs))

    def _content(self, differs: bool) -> int:
        """Another one for each rank whose copy has a flipped bit: two flips do not make two copies equal."""
        return 7 + differs * (1 + FLIPPED * (self._owner.rank + 1) ** 2)

    def _tell(self, telling: LayoutAnnouncement | None) -> None:
        owner = self._owner
        if telling is not None:
            owner.send(
                LayoutPublished(
                    member_id=owner.member_id,
                    generation=owner.machine.generation,
                    rank=owner.rank,
                    version=telling.version,
                    layout=telling.layout,
                )
            )
