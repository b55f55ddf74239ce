"""The state machine of one rank's part in a stop of all ranks at the end of one step.

Theory. A change of seats that repeats no step begins with a stop of all ranks. The controller orders one rank to
request the stop (``HoldOrder``), and the vote makes all ranks stop at the same step. There they wait for the fence with
which the change begins. If the controller gives up the change, it sends ``HoldOver`` instead of the fence. ``HoldOver``
may arrive before this rank has ended its step. If the controller is lost during the stop, each rank continues after
``HOLD_S`` seconds.

Invariants:
1. A ``HoldOrder`` counts for votes of its generation only, and for one stop.
2. A rank never waits in a stop that ``HoldOver`` has ended, even if ``HoldOver`` arrived before the stop.
"""

from __future__ import annotations

from holdfast.core.ids import NO_GENERATION, Generation, MemberId
from holdfast.core.protocol.notices import HoldOrder, HoldOver, HoldReached

HOLD_S = 5.0


class PauseMachine:
    """The order to this rank to request a stop of all ranks, and the newest stop that has ended."""

    def __init__(self) -> None:
        self._asked_in: Generation = NO_GENERATION
        self._over: tuple[Generation, int] = (NO_GENERATION, 0)

    def handle(self, message: HoldOrder | HoldOver) -> None:
        """Record an order to request a stop of all ranks, or the end of a stop."""
        if isinstance(message, HoldOrder):
            self._asked_in = message.generation
        else:
            self._over = (message.generation, message.step)

    def asks(self, generation: Generation) -> bool:
        """Return whether this rank requests the stop of all ranks in its next vote of ``generation``."""
        return self._asked_in == generation != NO_GENERATION

    def reach(self, member_id: MemberId, generation: Generation, step: int) -> HoldReached | None:
        """Record that this rank stops after ``step``.

        Return a report for the controller if this rank requested the stop.
        """
        asked = self.asks(generation)
        self._asked_in = NO_GENERATION
        return HoldReached(member_id=member_id, generation=generation, step=step) if asked else None

    def is_over(self, generation: Generation, step: int) -> bool:
        """Return whether the controller has ended the stop of all ranks after ``step``."""
        return self._over == (generation, step)
