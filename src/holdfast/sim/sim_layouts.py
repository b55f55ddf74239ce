"""Layouts of simulated ranks, and the agreement on them by the real ``core.worker.layout_agreement``.

There are only a few different layouts, so a rank often returns to an earlier layout. The layout of each rank changes at
random committed steps, independently of the other ranks. A newcomer may have another layout than the process that it
replaces.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import cache
from typing import Protocol

from holdfast.core.ids import NO_GENERATION, NO_VERSION, LayoutVersion, MemberId, SaveId
from holdfast.core.protocol.health_messages import CopiesDiffer, CopyDigest, ranks_text
from holdfast.core.protocol.layout_messages import Layout, Layouts
from holdfast.core.protocol.messages import Catalogued, LayoutPublished, Message, Receive
from holdfast.core.protocol.notices import HoldOver
from holdfast.core.worker.layout_agreement import LayoutAgreement, LayoutAnnouncement
from holdfast.core.worker.pause import HOLD_S, PauseMachine
from holdfast.core.worker.step import StepMachine
from holdfast.core.worker.vote import Ballot, Tally
from holdfast.sim.sim_store import SimStore

CATALOGUE_TIMEOUT_S = 15.0
CONTENTS = 3
CHANGES = 0.5  # expected number of changed layouts per step, of all ranks together
NEWCOMERS_THAT_DIFFER = 0.3
FLIPPED = 100_003  # larger than any number of ranks, so that no sum of digests with a flipped copy is zero


@cache
def _text(ranks: range) -> str:
    """Return a range of ranks as text. The text is cached, because thousands of ranks need the same one."""
    return ranks_text(ranks)


class LayoutOwner(Protocol):
    """The interface of a rank that owns a layout."""

    member_id: MemberId
    rank: int
    machine: StepMachine

    def send(self, message: Message) -> None: ...


class LayoutScene(Protocol):
    """The interface of the simulated world that layouts use.

    ``whims`` is a random generator that is used for changes of layouts and for nothing else.
    """

    world_size: int
    store: SimStore
    whims: random.Random

    def catalogued(self, version: LayoutVersion, layouts: Layouts) -> None: ...
    def stood(self, rank: int) -> None: ...
    def plans(self, save_id: SaveId, version: LayoutVersion, has_own: bool) -> None: ...


class SimLayouts:
    """The layout of one process, and its knowledge of the layouts of the other ranks.

    Attributes:
        agreement: the state machine that agrees with the other ranks on layouts.
        have: the newest layout version for which this rank has received the catalogue.
        pause: the state machine of a pause: all ranks wait between two steps while some ranks move to other nodes.
    """

    def __init__(self, owner: LayoutOwner, world: LayoutScene) -> None:
        self.agreement = LayoutAgreement()
        self.have = NO_VERSION
        self.pause = PauseMachine()
        self._stops_in = NO_GENERATION
        self._go_on: Callable[[], None] | None = None  # continues this rank after a pause
        self._own = b"0"
        self._layouts = Layouts((), {})
        self._owner = owner
        self._world = world

    def look(self) -> None:
        """Publish the layout of this rank if it differs from the layout that the rank last published."""
        self._tell(self.agreement.note(Layout(self._own, b""), self._owner.machine.generation))

    def drift(self) -> None:
        """Change the layout of this rank with a small probability, as if its tensors had changed. Publish a change."""
        if self._world.whims.random() < CHANGES / self._world.world_size:
            self._change()
        self.look()

    def _change(self) -> None:
        self._own = b"%d" % self._world.whims.randrange(CONTENTS)

    def inherit(self, order: Receive) -> None:
        """Take over the layouts of all ranks from ``order``, the order to this newcomer to receive its state.

        The newcomer publishes its own layout if the layout agreement requires that.
        """
        mine = order.layouts.by_rank()[self._owner.rank]
        if order.version != NO_VERSION:
            self._take(order.version, order.layouts)
        self._tell(self.agreement.inherit(order.version, mine))
        self._own = mine.own
        if self._world.whims.random() < NEWCOMERS_THAT_DIFFER:
            self._change()

    def ballot(self, said: Ballot) -> Ballot:
        """Return the ballot of the next vote: a copy of ``said`` in which the fields about layouts are filled in."""
        return self.agreement.ballot(said, self._owner.machine.generation, self.have)

    def read(self, tally: Tally) -> None:
        """Read the tally of the last vote, and publish this rank's layout if the tally requires that."""
        self._stops_in = self._owner.machine.generation if tally.hold else NO_GENERATION
        self._tell(self.agreement.read(tally))

    def stop(
        self, later: Callable[[float, str, Callable[[], None]], None], go_on: Callable[[], None]
    ) -> bool:
        """Pause this rank between two steps if the last vote ordered all ranks to pause.

        The pause ends with a fence or the message ``HoldOver``, at the latest after ``HOLD_S`` virtual seconds.

        Args:
            later: schedules an action: (delay in virtual seconds, label, action).
            go_on: called at the end of the pause, if no fence has ended it.

        Returns:
            True if the rank now pauses; False if the vote ordered no pause, or if that pause is already over.
        """
        here, self._stops_in, self._go_on = self._stops_in, NO_GENERATION, None
        owner = self._owner
        if here == NO_GENERATION or here != owner.machine.generation:
            return False
        if report := self.pause.reach(owner.member_id, here, owner.machine.step):
            owner.send(report)
        if self.pause.is_over(here, owner.machine.step):
            return False

        def late() -> None:
            if self._go_on is go_on and owner.machine.generation == here and owner.machine.fenced is None:
                self._world.stood(owner.rank)
                self._end_stop()

        self._go_on = go_on
        later(HOLD_S, "held", late)
        return True

    def stop_over(self, message: HoldOver) -> None:
        """End the pause that a message of the controller names. This rank need not have reached that pause yet."""
        owner = self._owner
        self.pause.handle(message)
        machine = owner.machine
        if self.pause.is_over(machine.generation, machine.step) and machine.fenced is None:
            self._end_stop()

    def _end_stop(self) -> None:
        go_on, self._go_on = self._go_on, None
        if go_on is not None:
            go_on()

    def catalogued(self, message: Catalogued) -> None:
        """Take over the layouts of all ranks from a message of the controller."""
        self._take(message.version, message.layouts)

    def _take(self, version: LayoutVersion, layouts: Layouts) -> None:
        self._world.catalogued(version, layouts)
        if version > self.have:
            self.have, self._layouts = version, layouts

    def plan(self, save_id: SaveId) -> None:
        """Check that this rank may plan a save by the newest layouts that it has received."""
        has_own = self._layouts.ranks.get(str(self._owner.rank), (b"", 0))[0] == self._own
        self._world.plans(save_id, self.have, has_own)

    def _sharers(self) -> range:
        """Return the ranks that hold the same box as this rank."""
        shards = self._world.store.shards
        return range(self._owner.rank % shards, self._world.world_size, shards)

    def digest(self, differs: bool) -> int:
        """Return the digest of this rank's copy of its box (with a flipped bit if ``differs``), times a factor.

        The factors of the ranks make the sum over equal copies zero.
        """
        sharers = self._sharers()
        return self._content(differs) * (1 - len(sharers) if self._owner.rank == sharers[0] else 1)

    def copy(self, differs: bool) -> CopyDigest:
        """Return the digest of this rank's copy of its box, in the form of a report to the controller.

        ``differs`` is True if this copy has a flipped bit.
        """
        return CopyDigest(_text(self._sharers()), "w", self._content(differs))

    def tell_difference(self, differs: bool) -> None:
        """Report the digest of this rank's copy of its box, after a vote has found that copies differ.

        ``differs`` is True if this copy has a flipped bit.
        """
        owner = self._owner
        owner.send(
            CopiesDiffer(
                member_id=owner.member_id,
                generation=owner.machine.generation,
                step=owner.machine.step,
                copies=(self.copy(differs),),
            )
        )

    def _content(self, differs: bool) -> int:
        """Return the digest of this rank's copy of its box. Two ranks with flipped copies have different digests."""
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
