"""Time limits of a recovery for a process that makes no progress.

Theory. Each phase waits for members: for an answer to a fence, for digests, an offer of state, a join, a share of a
save. The time of such a wait grows with the size of the state, which may be hundreds of gigabytes. A wait that ends
too early kills the only holder of a part of the state. So the first time limit includes the time in which a slow node
moves the state of one rank. A member that has made progress in that time gets the time limit again. Progress is a
message of the member, or bytes that its agent saw move (``Active``). Only a member without progress in a whole time
limit is killed. A stopped process makes no progress and is not waited for.

Invariants:
1. A member that has made progress since its time limit began is not killed at the end of the time limit. The return of
   its node counts as progress, because the member receives its orders only then.
2. While a phase waits for a member that is not about to be killed, a time limit of the phase runs.
3. Stopped processes are killed by the rule for a training job (``core/watch/hang_attribution.py``): never more than
   half of them.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import msgspec

from holdfast.core.ids import MemberId, NodeId
from holdfast.core.job.job_state import Job
from holdfast.core.job.membership import Member
from holdfast.core.protocol.health_messages import Active

RATE_BYTES_PER_S = 25_000_000
"""Rate at which one rank of a slow node writes to a shared file system while all ranks of the node write."""

FAILS_TO: dict[str, str] = {
    "quiesce": "settle",
    "retry": "come to the step",
    "vouch": "tell what it holds",
    "offer": "give its state",
    "join": "join",
    "gasp": "save",
    "leave": "leave",
}
"""The time limits by name, with the verb for a member that exceeds one. ``PhaseRules.waits`` names those of each phase.

The other phases have a separate timer (``grace``, ``startup``), or the workers train, and
``core/watch/hang_detection.py`` judges them.
"""


class Running(msgspec.Struct):
    """A time limit that runs, and the members that have made progress since it began."""

    bound_s: float
    moved: set[MemberId]
    again: bool = False  # it follows an earlier run of this time limit, in which members made progress


class Bounds:
    """The part of :class:`~holdfast.core.job.recovery.Recovery` that starts and checks the time limits.

    It shares the facts of the run (``job``) with the recovery.
    """

    def __init__(self, job: Job) -> None:
        self.job = job
        self._running: dict[str, Running] = {}
        self._stopped: dict[NodeId, frozenset[MemberId]] = {}

    def begin(self, wait: str, bound_s: float, *, reads: bool = False) -> None:
        """Start the time limit ``wait`` of ``bound_s`` seconds.

        Args:
            wait: name of the time limit, for example ``quiesce`` (a key of ``FAILS_TO``).
            bound_s: length in seconds, without the time to move state.
            reads: add the time in which the state of one rank is moved.
        """
        if reads:
            bound_s += self.job.state_size_bytes / RATE_BYTES_PER_S
        self._begin(wait, Running(bound_s, set()))

    def _begin(self, wait: str, running: Running) -> None:
        self._running[wait] = running
        self.job.timer(wait, running.bound_s)

    def end(self, *waits: str) -> None:
        """End the time limits named ``waits``: no member is waited for under them."""
        for wait in waits:
            self._running.pop(wait, None)
            self.job.cancel(wait)

    def moved(self, member_id: MemberId) -> None:
        """Record that this member has made progress, for all time limits that run."""
        for running in self._running.values():
            running.moved.add(member_id)

    def heard(self, event: Active) -> None:
        """Record the progress and the stopped processes that an agent has reported."""
        for member_id in event.moving:
            self.moved(member_id)
        self._stopped[event.node_id] = frozenset(event.stopped)

    def over(self, wait: str, awaited: Sequence[Member], held_up: Collection[MemberId]) -> None:
        """Handle the end of a time limit: kill the members without progress since it began.

        Start the limit again for the others.

        Args:
            wait: name of the time limit.
            awaited: the members that the phase waits for under this time limit.
            held_up: the members among these that wait for others, or whose node is suspected.
        """
        running = self._running.pop(wait, None)
        waited = [m for m in awaited if not m.kill_reason]
        if running is None or not waited:
            return
        late = [m for m in waited if m.member_id not in running.moved and m.member_id not in held_up]
        how = "in another" if running.again else "within"
        for member in late:
            self.job.time_out(member, f"did not {FAILS_TO[wait]} {how} {running.bound_s:.3g} s")
        if len(late) < len(waited):
            self._begin(wait, Running(running.bound_s, set(), again=True))

    def halt(self, now: float, awaited: Sequence[Member]) -> None:
        """Kill the members of ``awaited`` whose processes are stopped. If most of the job is stopped, do nothing."""
        stopped = frozenset().union(*self._stopped.values())
        living = self.job.roster.living
        if not stopped or 2 * sum(m.member_id in stopped for m in living) > max(len(living), 2):
            return
        for member in awaited:
            if member.member_id in stopped and not member.kill_reason:
                self.job.time_out(member, "hangs: its process is stopped (state T)", hung_at_s=now)
