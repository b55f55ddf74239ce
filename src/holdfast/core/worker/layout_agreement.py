"""The agreement of all ranks on their layouts, as seen by one rank: which layout it has published, and under which
vote.

Theory. The layouts of all ranks at one moment decide which rank writes which part of a checkpoint. But layouts change
on each rank separately: a tensor joins the state of one rank some steps before it joins that of another, and a newcomer
lacks tensors that the survivors have. So the ranks need a common name for a moment. That name is a vote, because all
ranks of a generation count its votes alike. A layout *version* is the name of a vote.

A rank sets ``moved`` in its ballot when its layout differs from the one it published under its version. If any rank set
it, every rank that reads the tally publishes its layout under the name of this vote. When all have done so, the
controller sends the catalogue (the layouts of all ranks) to all.

The catalogue of a version exists only when every rank published under that version. So a rank that has it knows that
all ranks have this version, or will have it. If the catalogue of a rank's version has not come, either a death cut off
the vote before all ranks read it, or the catalogue was lost with an agent. The rank then sets ``moved`` too: when the
generation has changed, and before every save. At other votes the catalogue is taken to be on its way.

A rank whose layout changes between two votes publishes it at once, without a version, so that a recovery has the newest
layouts.

Invariants:
1. Under one version a rank publishes one layout, so the catalogue of a version is the same everywhere.
2. After a vote between two steps in which no rank set ``moved``, every rank has the same catalogue, and it is up to
   date.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from holdfast.core.ids import NO_VERSION, Generation, LayoutVersion
from holdfast.core.protocol.layout_messages import Layout
from holdfast.core.worker.vote import Ballot, Tally


class LayoutAnnouncement(NamedTuple):
    """A layout and its version, to be published to the controller."""

    version: LayoutVersion
    layout: Layout


class LayoutAgreement:
    """One rank's record of the layouts that it has published, and of their version.

    Attributes:
        version: the version that this rank has.
        vote: the last vote that it took part in.
        layout: the layout that it published last; None before the first.
    """

    def __init__(self) -> None:
        self.version = NO_VERSION
        self.vote = NO_VERSION
        self.layout: Layout | None = None
        self._under: Layout | None = None  # the layout published under ``version``

    def note(self, layout: Layout, generation: Generation) -> LayoutAnnouncement | None:
        """Record ``layout`` as the present layout of this rank.

        Return the message to publish, or None if nothing has changed.
        """
        if self.layout is None:  # all ranks of a start begin together
            self.version, self._under = LayoutVersion(generation, 0), layout
        elif layout == self.layout:
            return None
        self.layout = layout
        return LayoutAnnouncement(self.version if layout == self._under else NO_VERSION, layout)

    def inherit(self, version: LayoutVersion, layout: Layout) -> LayoutAnnouncement:
        """Take over the layout and version of the lost rank that this newcomer replaces. Return the message to publish.

        With NO_VERSION the layout of the lost rank has no version.
        """
        self.version, self.layout = version, layout
        self._under = None if version == NO_VERSION else layout
        return LayoutAnnouncement(version, layout)

    def ballot(self, said: Ballot, generation: Generation, have: LayoutVersion) -> Ballot:
        """Return the ballot ``said`` for the next vote, with ``moved`` set if needed.

        Args:
            said: the ballot without ``moved``.
            generation: the generation that votes.
            have: the newest version whose catalogue this rank has received.
        """
        again = self.vote.generation == generation
        self.vote = LayoutVersion(generation, self.vote.vote + 1 if again else 1)
        lacks = have < self.version and (said.between or self.version.generation != generation)
        return msgspec.structs.replace(said, moved=lacks or self.layout != self._under)

    def read(self, tally: Tally) -> LayoutAnnouncement | None:
        """Read the tally of the last ballot. Return the layout to publish, or None if there is nothing to publish."""
        if self.layout is None or not tally.moved:
            return None
        self.version, self._under = self.vote, self.layout
        return LayoutAnnouncement(self.version, self.layout)
