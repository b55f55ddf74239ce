"""What one rank has told of its layout, and under which vote: so that all ranks come to know the layouts of one moment.

Theory. Who writes what of a checkpoint follows from the layouts of all ranks at one moment, and each rank's changes on
its own: a tensor comes into the state of one rank steps before it comes on another, a newcomer lacks what the survivors
have. So no rank numbers its layouts by itself. A *version* is the name of a vote, and all ranks of a generation count
its votes alike. A rank says in its ballot that it ``moved`` when it holds something else than it told under its
version; and when the tally says that anybody did, everybody who reads it tells what it holds under the name of this
vote. That completes a catalogue, which the controller sends to all.

The catalogue of a version comes only when every rank told its layout under it, so who has it knows that all ranks stand
at this version, or will. A rank that stands at one whose catalogue did not come says that it moved as well: the vote
was not read by all of them (a death cut it off), or the catalogue was lost with an agent. It says so when the
generation is another one, and before every save; at other votes it is taken to be under way.

Between two votes a rank that changed tells so at once, under no version: a fault is answered with the newest layouts.

Invariants:
1. Under one version a rank tells one layout, so the catalogue of a version is the same wherever it is.
2. After a vote between two steps that says that nobody moved, every rank has the same catalogue, and it is true now.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from holdfast.core.ids import NO_VERSION, Generation, LayoutVersion
from holdfast.core.protocol.layout_messages import Layout
from holdfast.core.worker.vote import Ballot, Tally


class LayoutAnnouncement(NamedTuple):
    """What is to be told to the controller."""

    version: LayoutVersion
    layout: Layout


class LayoutAgreement:
    """See the module.

    Attributes:
        version: that this rank stands at.
        vote: the last one that it took part in.
        layout: that it told last; None before it has begun.
    """

    def __init__(self) -> None:
        self.version = NO_VERSION
        self.vote = NO_VERSION
        self.layout: Layout | None = None
        self._under: Layout | None = None  # what was told under ``version``

    def note(self, layout: Layout, generation: Generation) -> LayoutAnnouncement | None:
        """This rank holds ``layout`` now; None when that was told."""
        if self.layout is None:  # all ranks of a start begin together
            self.version, self._under = LayoutVersion(generation, 0), layout
        elif layout == self.layout:
            return None
        self.layout = layout
        return LayoutAnnouncement(self.version if layout == self._under else NO_VERSION, layout)

    def inherit(self, version: LayoutVersion, layout: Layout) -> LayoutAnnouncement:
        """A newcomer stands for the one whose seat it takes: with NO_VERSION that one's layout is of none."""
        self.version, self.layout = version, layout
        self._under = None if version == NO_VERSION else layout
        return LayoutAnnouncement(version, layout)

    def ballot(self, said: Ballot, generation: Generation, have: LayoutVersion) -> Ballot:
        """The next vote's; ``have`` is the newest version whose catalogue has come."""
        again = self.vote.generation == generation
        self.vote = LayoutVersion(generation, self.vote.vote + 1 if again else 1)
        lacks = have < self.version and (said.between or self.version.generation != generation)
        return msgspec.structs.replace(said, moved=lacks or self.layout != self._under)

    def read(self, tally: Tally) -> LayoutAnnouncement | None:
        """The vote of the last ballot has ended; None when nothing is to be told."""
        if self.layout is None or not tally.moved:
            return None
        self.version, self._under = self.vote, self.layout
        return LayoutAnnouncement(self.version, self.layout)
