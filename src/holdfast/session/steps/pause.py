"""A stop of all ranks at the end of one step, for a change of seats that repeats no step.

Theory. The controller orders one rank to ask for the stop. The vote makes all ranks stop at the same step. There they
wait for the fence with which the change begins. The fence comes within milliseconds, because the controller prepares
everything before it orders the stop. If the change is given up meanwhile, ``HoldOver`` comes in its place. It may come
before this rank has ended its step. If the controller is lost by then, each rank continues after ``HOLD_S``.
"""

from __future__ import annotations

import time

from holdfast.core.ids import NO_GENERATION, Generation
from holdfast.core.protocol.notices import HoldOrder, HoldOver, HoldReached
from holdfast.session.steps.participant import StepParticipant

HOLD_S = 5.0


class Pause:
    """One rank's part in a stop of all ranks: its request for the stop, and its wait for the fence.

    Args:
        rank: protocol state of the session's rank.
    """

    def __init__(self, rank: StepParticipant) -> None:
        self._rank = rank
        self._asked_in: Generation = NO_GENERATION
        # The newest stop for which no rank waits any longer.
        self._over: tuple[Generation, int] = (NO_GENERATION, 0)
        if rank.client is not None:
            rank.client.on(HoldOrder, self.order)
            rank.client.on(HoldOver, self.over)

    def order(self, order: HoldOrder) -> None:
        """Make the next vote ask for the stop. Runs in the client thread."""
        self._asked_in = order.generation

    def over(self, order: HoldOver) -> None:
        """End the wait before this step, also if it has not begun. Runs in the client thread."""
        with self._rank.changed:
            self._over = (order.generation, order.step)
            self._rank.changed.notify_all()

    @property
    def asked(self) -> bool:
        """True if the next vote asks for the stop. An order of an earlier generation does not count."""
        return self._asked_in == self._rank.machine.generation != NO_GENERATION

    def wait(self) -> None:
        """Wait for the fence or for the end of the stop, at most ``HOLD_S``, after a vote that made all ranks stop."""
        rank = self._rank
        asked, self._asked_in = self.asked, NO_GENERATION
        if rank.client is None:
            return
        if asked:
            said = HoldReached(member_id=rank.member_id, generation=rank.machine.generation, step=rank.step)
            rank.client.send(said)
        until_s = time.monotonic() + HOLD_S
        with rank.changed:
            while not self._ended and (left_s := until_s - time.monotonic()) > 0:
                rank.changed.wait(left_s)

    @property
    def _ended(self) -> bool:
        rank = self._rank
        return rank.fenced or rank.orphaned or self._over == (rank.machine.generation, rank.step)
