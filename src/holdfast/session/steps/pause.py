"""A stop of all ranks at the end of one step: the threads and the wait around ``core.worker.pause.PauseMachine``."""

from __future__ import annotations

import time

from holdfast.core.protocol.notices import HoldOrder, HoldOver
from holdfast.core.worker.pause import HOLD_S, PauseMachine
from holdfast.session.steps.participant import StepParticipant


class Pause:
    """One rank's part in a stop of all ranks: its request for the stop, and its wait for the fence that follows.

    Args:
        rank: protocol state of this rank.
    """

    def __init__(self, rank: StepParticipant) -> None:
        self._rank = rank
        self._machine = PauseMachine()
        if rank.client is not None:
            rank.client.on(HoldOrder, self._take)
            rank.client.on(HoldOver, self._take)

    def _take(self, message: HoldOrder | HoldOver) -> None:
        """Handle an order of the controller: that this rank requests a stop, or that a stop is over.

        The client thread calls this method.
        """
        with self._rank.changed:
            self._machine.handle(message)
            self._rank.changed.notify_all()

    @property
    def asked(self) -> bool:
        """True if this rank must request the stop in its next vote. An order of an earlier generation is ignored."""
        return self._machine.asks(self._rank.machine.generation)

    def wait(self) -> None:
        """After a vote that stops all ranks, wait for the fence or the end of the stop, at most ``HOLD_S`` seconds."""
        rank = self._rank
        if rank.client is None:
            return
        with rank.changed:
            report = self._machine.reach(rank.member_id, rank.machine.generation, rank.step)
        if report is not None:
            rank.client.send(report)
        until_s = time.monotonic() + HOLD_S
        with rank.changed:
            while not self._ended and (left_s := until_s - time.monotonic()) > 0:
                rank.changed.wait(left_s)

    @property
    def _ended(self) -> bool:
        rank = self._rank
        return rank.fenced or rank.orphaned or self._machine.is_over(rank.machine.generation, rank.step)
