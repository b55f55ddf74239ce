"""The members that a recovery waits for in each phase. ``wait_bounds.py`` has the time limits.

Invariants:
1. A member that waits for others is not late. Examples: a newcomer while no state is offered, a source while its state
   is compared.
2. A stopped process is not waited for if the phase needs something that the process has yet to do.
3. A member on a suspected node is not late. Its order may not have arrived, and its answer may be on the way. The node
   has a time limit of its own, after which it is lost with all its members. When the node is heard again, its members
   get the whole time limit of the phase.
"""

from __future__ import annotations

from typing import Protocol

from holdfast.core.decide.recovery_phases import PhaseRules
from holdfast.core.job.job_state import Job
from holdfast.core.job.last_gasp import LastGaspSave
from holdfast.core.job.membership import Member
from holdfast.core.job.replacement import Replacement
from holdfast.core.job.source_digests import SourceDigests
from holdfast.core.job.wait_bounds import Bounds
from holdfast.core.protocol.health_messages import Active
from holdfast.core.protocol.messages import Settled


class AwaitedAnswer(Protocol):
    """The part of a recovery's interface that this module needs."""

    bounds: Bounds
    replacement: Replacement
    gasp: LastGaspSave
    reports: dict[int, Settled]
    digests: SourceDigests

    @property
    def rules(self) -> PhaseRules:
        """The rules of the current phase."""

    def is_there(self, member: Member) -> bool:
        """Return True if the member is at the step of the decision, or can go back to it."""


class Awaited:
    """The part of :class:`~holdfast.core.job.recovery.Recovery` that knows which members the current phase waits for.

    It shares the facts of the run (``job``) with the recovery.
    """

    def __init__(self, job: Job, recovery: AwaitedAnswer) -> None:
        self.job = job
        self.recovery = recovery

    def tick(self, wait: str) -> None:
        """Handle the end of the time limit named ``wait``."""
        awaited = [m for m in self.job.roster.living if self.is_awaited(wait, m)]
        held_up = {m.member_id for m in awaited if self._is_held_up(wait, m)}
        self.recovery.bounds.over(wait, awaited, held_up)

    def active(self, now: float, event: Active) -> None:
        """Handle a report of an agent on its processes. Kill stopped processes that the recovery waits for."""
        recovery = self.recovery
        recovery.bounds.heard(event)
        waits = recovery.rules.waits
        if event.stopped and waits:
            # If all ranks continue in place, a source serves its state until all newcomers have joined.
            everyone, living = recovery.rules.in_place, self.job.roster.living
            recovery.bounds.halt(
                now, [m for m in living if everyone or any(self.is_awaited(wait, m) for wait in waits)]
            )

    def is_awaited(self, wait: str, member: Member) -> bool:
        """Return True if the current phase waits for this member under the time limit named ``wait``."""
        recovery = self.recovery
        if wait not in recovery.rules.waits:
            return False
        match wait:
            case "quiesce":
                return member.rank not in recovery.reports
            case "retry":
                return not recovery.is_there(member)
            case "vouch":
                return member.rank in recovery.digests.awaited
            case "offer":
                return not member.joining and recovery.replacement.awaits(member)
            case "join":
                return member.joining or not recovery.is_there(member)
            case "gasp":
                return member.rank in recovery.gasp.writing
        return True

    def _is_held_up(self, wait: str, member: Member) -> bool:
        """Return True if the member cannot be expected to act yet.

        The member waits for others, or first has to finish another of its tasks, or its node is suspected.
        """
        recovery = self.recovery
        if self.job.liveness.is_suspected(member.node_id):
            return True
        if wait == "join" and member.joining:
            return member.asked and (recovery.rules.compares or not recovery.replacement.is_offered)
        return wait == "offer" and recovery.rules.compares and member.rank in recovery.digests.awaited
