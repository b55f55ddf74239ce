"""All ranks stop at the end of one step, for a change of seats that redoes nothing.

Theory. One rank is ordered to ask for it; the vote makes all of them stop at the same boundary. There they wait for the
fence with which the change begins. It comes within milliseconds: the controller has everything ready before it orders.
Should the controller be gone by then, each rank continues after ``HOLD_S``: nothing was promised.
"""

from __future__ import annotations

import time

from holdfast.core.ids import NO_GENERATION, Generation
from holdfast.core.protocol.notices import HoldOrder, HoldReached
from holdfast.session.steps.participant import StepParticipant

HOLD_S = 5.0


class Pause:
    """Of one rank.

    Args:
        rank: of the session.
    """

    def __init__(self, rank: StepParticipant) -> None:
        self._rank = rank
        self._asked_in: Generation = NO_GENERATION
        if rank.client is not None:
            rank.client.on(HoldOrder, self.order)

    def order(self, order: HoldOrder) -> None:
        """Ask for it in the next vote. In the client thread."""
        self._asked_in = order.generation

    @property
    def asked(self) -> bool:
        """The next vote asks for it; not in a generation after that of the order."""
        return self._asked_in == self._rank.machine.generation != NO_GENERATION

    def wait(self) -> None:
        """The last vote has said that all stop here: until the fence, or not for long."""
        rank = self._rank
        asked, self._asked_in = self.asked, NO_GENERATION
        if rank.client is None:
            return
        if asked:
            said = HoldReached(member_id=rank.member_id, generation=rank.machine.generation, step=rank.step)
            rank.client.send(said)
        until_s = time.monotonic() + HOLD_S
        with rank.changed:
            while not (rank.fenced or rank.orphaned) and (left_s := until_s - time.monotonic()) > 0:
                rank.changed.wait(left_s)
