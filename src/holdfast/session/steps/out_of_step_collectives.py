"""A guard against collectives that a newcomer makes between two steps, before it has joined the job.

Theory. All ranks together run the script's code before the block of a step, or between two loops: for example an
evaluation that sums over all ranks. A newcomer reaches this code alone, because the other ranks have passed it or wait
for the newcomer. If collectives used only its own data, the newcomer would silently compute another result than the
other ranks: another learning rate, or another early stop. So the newcomer does not join, and reports the collective.
All ranks then restart at this step and run the code together. If the script runs such code again with its block,
without ``if not step.again``, a warning is logged.

A barrier returns no data. So the newcomer may pass it alone if the lost rank had already run this code and begun the
block: no other rank waits in the barrier then. Where the code runs for the first time, a barrier is guarded like other
collectives. Otherwise a survivor that has not got the step from its loop yet would later wait in that barrier for ever.

A framework that drives the loop (a Trainer) may make collectives during its setup, because they give the same results
at each start. The integration of such a framework also restores the framework's own position.
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
    """The check of every collective that this process starts."""

    def __init__(self, rank: StepParticipant) -> None:
        self._rank = rank
        self._warned = False

    def collective(self, count: int, what: str) -> None:
        """Check and count a collective that starts. Hot path.

        Never returns in a newcomer that must not run the collective.

        Args:
            count: number of collectives that this process has started, with this one.
            what: kind of the collective, for example ``BARRIER``.
        """
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
