"""A guard against collectives that a newcomer makes between two steps, before it has joined the job.

Theory. The code of a script before the block of a step, or between two loops, is run by all ranks together: an
evaluation sums over all of them. A newcomer reaches this code alone. The other ranks are past it, or wait for the
newcomer. On its own data the newcomer would silently compute another result than the other ranks, for example another
learning rate or another early stop. So it does not join and reports this. All ranks then restart at this step and run
the code together. A script that repeats such code when a block is tried again (without ``step.again``) gets a warning.
A barrier returns no data. It is allowed where the code runs again: the rank that is replaced had begun the block, so no
other rank waits in that barrier. Where the code runs for the first time, a survivor that was not given the step yet
would wait in the barrier for ever. A framework that drives the loop may also make collectives during its setup, because
their results are the same in each start. The integrations tell such a framework which work is due between two steps.
"""

from __future__ import annotations

import logging

from holdfast.core.protocol.messages import StateRefused
from holdfast.core.worker.position import ScriptEvent
from holdfast.session.steps.participant import StepParticipant

log = logging.getLogger("holdfast")

BARRIER = "barrier"
WHY = "a collective between two steps, which a newcomer cannot make alone"


class CollectiveGuard:
    """Checks every collective that this process starts."""

    def __init__(self, rank: StepParticipant) -> None:
        self._rank = rank
        self._warned = False

    def collective(self, count: int, what: str) -> None:
        """Count a collective that starts. Never return in a newcomer that must not run the collective. Hot path."""
        script = self._rank.script
        if script.rules.guarded and (what != BARRIER or not script.repeats):
            self._check()
        self._rank.count_collective(count)

    def _check(self) -> None:
        rank, client = self._rank, self._rank.client
        if rank.script.repeats and not self._warned:
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
        # This process keeps its state for the fence to come, but no decision lets it continue from here.
        rank.moved(ScriptEvent.STRAYED)
        rank.await_end()
