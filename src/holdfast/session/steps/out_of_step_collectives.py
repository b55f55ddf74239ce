"""Collectives of the script between two steps, in a process that is no part of the job yet.

Theory. What a script does before the block of a step, or between two loops, is done by all ranks together: an
evaluation adds up over all of them. A newcomer comes there alone: the others are past it, or wait for the newcomer. On
its own data alone the result would be another one than that of the others, without a word, and a learning rate or an
early stop that follows from it. So it does not join, and says so: all ranks start again at this step, and do it
together. The same holds for a script that repeats such work when a block is tried again (without ``step.again``). A
barrier gives nobody anything: who comes alone has simply passed it. And a framework that drives the loop sets itself up
in it, with sums over ranks that are the same in each start; what is due between two steps it is told (integrations).
"""

from __future__ import annotations

import logging

from holdfast.core.protocol.messages import StateRefused
from holdfast.session.steps.participant import StepParticipant

log = logging.getLogger("holdfast")

BARRIER = "barrier"
WHY = "a collective between two steps, which a newcomer cannot make alone"


class CollectiveGuard:
    """Hears of every collective of this process.

    Attributes:
        open: the script is between two loops, or between a step of the loop and its block.
        again: what stands before the block was done already (``Step.again``).
    """

    def __init__(self, rank: StepParticipant) -> None:
        self.open = False
        self.again = False
        self._rank = rank
        self._warned = False

    def enter(self, *, again: bool = False) -> None:
        """The script goes on outside of a block."""
        self.open, self.again = True, again

    def leave(self) -> None:
        """A block begins, or a loop."""
        self.open = False

    def collective(self, count: int, what: str) -> None:
        """One begins; hot path. Does not return in a newcomer that must not make it."""
        if self.open and what != BARRIER:
            self._check()
        self._rank.count_collective(count)

    def _check(self) -> None:
        rank, client = self._rank, self._rank.client
        if self.again and not self._warned:
            self._warned = True
            log.warning(
                "holdfast: a collective before the block of step %d, which is run again: the ranks may meet in it at "
                "different steps; write `if ... and not step.again:` around it",
                rank.step,
            )
        if not rank.joining or client is None:
            return
        log.warning("holdfast: %s: all ranks start again at step %d", WHY, rank.step)
        client.send(
            StateRefused(
                member_id=rank.member_id,
                generation=rank.machine.generation,
                step=rank.step,
                reason=WHY,
                alone=True,
            )
        )
        with rank.changed:
            rank.stray()  # it holds the state, and the fence asks it: no decision lets it go on from here
        rank.await_end()
