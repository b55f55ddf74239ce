"""The watch over collectives between two steps: a guard before a newcomer has joined, and a record for all ranks.

Theory. All ranks together run the script's code before the block of a step, or between two loops: for example an
evaluation that sums over all ranks. A newcomer reaches this code alone, because the other ranks have passed it or wait
for the newcomer. If collectives used only its own data, the newcomer would silently compute another result than the
other ranks: another learning rate, or another early stop. So the newcomer does not join, and reports the collective.
All ranks then restart at this step and run the code together. If the script runs such code again with its block,
without ``if not step.again``, a warning is logged.

A barrier returns no data. So the newcomer may pass it alone if the lost rank had already run this code and begun the
block: no other rank waits in the barrier then. Where the code runs for the first time, a barrier is guarded like other
collectives. Otherwise a survivor that has not got the step from its loop yet would later wait in that barrier for ever.

After a newcomer has joined, code after a block may make collectives under conditions. A condition may depend on a
variable that the newcomer does not have (a count of ticks). No rank sees this alone, so each rank records its
collectives outside of blocks. The controller compares the records after a fault
(``core/decide/unmatched_collectives.py``).

A framework that drives the loop (a Trainer) may make collectives during its setup, because they give the same results
at each start. The integration of such a framework also restores the framework's own position.
"""

from __future__ import annotations

import logging
import threading

import msgspec

from holdfast.core.protocol.messages import (
    OUTSIDE_TOLD_MAX,
    OutsideCollective,
    OutsideCollectives,
)
from holdfast.core.worker.position import BESIDE_BLOCK, ScriptEvent
from holdfast.session.steps.participant import StepParticipant
from holdfast.session.variables.deciding_variables import (
    VARIABLES_MAX,
    deciding_variables,
    described,
    places_in_script,
)

log = logging.getLogger("holdfast")

BARRIER = "barrier"
NAME_LENGTH_MAX = 40
WHAT_LENGTH_MAX = 120
WHY = "a collective between two steps, which a newcomer cannot make alone"


class CollectiveGuard:
    """The check of every collective that this process starts."""

    def __init__(self, rank: StepParticipant) -> None:
        self._rank = rank
        self._warned = False
        self._thread = threading.get_ident()
        self._outside: OutsideCollectives | None = None

    def collective(self, count: int, what: str, joint: bool) -> None:
        """Check and count a collective that starts. Hot path.

        Never returns in a newcomer that must not run the collective.

        Args:
            count: number of collectives that this process has started, with this one.
            what: kind of the collective, for example ``BARRIER``.
            joint: all ranks of the job make it.
        """
        script = self._rank.script
        if script.rules.guarded and (what != BARRIER or not script.repeats):
            self._check()
        if joint and script.position in BESIDE_BLOCK and threading.get_ident() == self._thread:
            self._record(what)
        self._rank.count_collective(count)

    def outside(self) -> OutsideCollectives | None:
        """Return the newest collectives of the script outside of blocks; None if it has made none."""
        return self._outside

    def _record(self, what: str) -> None:
        rank, client, last = self._rank, self._rank.client, self._outside
        # Before the first step of a generation, ranks may run code again that others have run before.
        if client is None or not rank.reached or rank.fenced:
            return
        generation, step = rank.machine.generation, rank.step
        if last is None or (last.generation, last.step) != (generation, step):
            last = OutsideCollectives(generation=generation, step=step, made=0, first=())
        made = last.made + 1
        if made > OUTSIDE_TOLD_MAX:
            self._outside = msgspec.structs.replace(last, made=made)
            client.page.count_outside(made)
        else:
            first = (*last.first, self._describe(what))
            self._outside = msgspec.structs.replace(last, made=made, first=first)
            client.page.write_outside(self._outside)

    def _describe(self, what: str) -> OutsideCollective:
        places = places_in_script()
        if not places:
            return OutsideCollective(what)
        names = tuple(name[:NAME_LENGTH_MAX] for name in deciding_variables(places)[:VARIABLES_MAX])
        return OutsideCollective(f"{what} at {described(places)}"[:WHAT_LENGTH_MAX], names)

    def _check(self) -> None:
        rank = self._rank
        if rank.script.repeats and not self._warned:
            self._warned = True
            log.warning(
                "holdfast: a collective before the block of step %d, which is run again: the ranks may meet in it at "
                "different steps; write `if ... and not step.again:` around it",
                rank.step,
            )
        if not rank.joining or rank.client is None:
            return
        log.warning("holdfast: %s: all ranks start again at step %d", WHY, rank.step)
        rank.refuse(rank.machine.generation, rank.step, WHY, alone=True)
        # This process keeps its state for the fence to come, but no decision lets it continue from here.
        rank.moved(ScriptEvent.STRAYED)
        rank.await_end()
