"""The agreement of all ranks on their layouts, as seen by one rank: the published layouts and their versions.

Theory. The layouts of all ranks at one moment decide which rank writes which part of a checkpoint. But layouts change
on each rank separately: a tensor joins the state of one rank some steps before the state of another rank, and a
newcomer lacks tensors of the survivors. So the ranks need a common name for a moment. The name is a vote, because all
ranks of a generation count its votes alike. A layout *version* is the name of a vote.

A rank sets ``moved`` in its ballot when its layout differs from the one it published under its version. If any rank set
``moved``, every rank that reads the tally publishes its layout under the name of this vote. When all ranks have done
so, the controller sends the catalogue (the layouts of all ranks) to all of them.

The catalogue of a version exists only if every rank published under that version. So a rank that has the catalogue
knows that all ranks have this version or will have it. A rank may lack the catalogue of its version for two reasons: a
death cut off the vote before all ranks read it, or the catalogue was lost with an agent. The rank then sets ``moved``
again in two cases: when the generation has changed, and before every save. At any other vote the rank assumes that the
catalogue is still on its way.

A rank whose layout changes between two votes publishes the layout at once, without a version, so that a recovery has
the newest layouts.

Invariants:
1. Under one version a rank publishes one layout, so the catalogue of a version is the same everywhere.
2. A vote may also take place between two steps, where no update follows. If no rank sets ``moved`` in such a vote,
   every rank then has the same up-to-date catalogue.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from holdfast.core.ids import NO_VERSION, Generation, LayoutVersion
from holdfast.core.protocol.layout_messages import Layout
from holdfast.core.worker.vote import Ballot, Tally


class LayoutAnnouncement(NamedTuple):
    """A layout that a rank has to publish to the controller, and its version."""

    version: LayoutVersion
    layout: Layout


class LayoutAgreement:
    """The layouts that one rank has published, and their version.

    Attributes:
        version: the layout version that this rank has adopted.
        vote: the last vote in which this rank took part.
        layout: the layout that this rank published last; None before the first.
    """

    def __init__(self) -> None:
        self.version = NO_VERSION
        self.vote = NO_VERSION
        self.layout: Layout | None = None
        self._under: Layout | None = None  # the layout published under ``version``

    def note(self, layout: Layout, generation: Generation) -> LayoutAnnouncement | None:
        """Record ``layout`` as the present layout of this rank.

        Return the announcement to publish, or None if the layout has not changed.
        """
        if self.layout is None:  # all ranks of a start publish their first layouts under vote 0
            self.version, self._under = LayoutVersion(generation, 0), layout
        elif layout == self.layout:
            return None
        self.layout = layout
        return LayoutAnnouncement(self.version if layout == self._under else NO_VERSION, layout)

    def inherit(self, version: LayoutVersion, layout: Layout) -> LayoutAnnouncement:
        """Take over layout and version of the lost rank that this newcomer replaces.

        Return the announcement to publish. ``version`` is NO_VERSION if the lost rank published this layout without
        one.
        """
        self.version, self.layout = version, layout
        self._under = None if version == NO_VERSION else layout
        return LayoutAnnouncement(version, layout)

    def ballot(self, said: Ballot, generation: Generation, have: LayoutVersion) -> Ballot:
        """Return the ballot ``said`` for the next vote, with ``moved`` set if the layouts must be published again.

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
        """Apply the tally of the last vote. Return the layout to publish, or None if no rank set ``moved``."""
        if self.layout is None or not tally.moved:
            return None
        self.version, self._under = self.vote, self.layout
        return LayoutAnnouncement(self.version, self.layout)
