"""Processes that ended with code 0 while others still compute.

Theory. Without a session an end with code 0 is no fault: the ranks of a script may end one after the other. It becomes
one when another rank loses a peer, or stands in a collective: the process that has ended is the peer that is missed.
Its death is the fault then, and comes before the one of the rank that has found it.

Invariants:
1. A process that ended with code 0 is a fault once at most, and only as the cause of another rank's.
"""

from __future__ import annotations

from holdfast.core.job.fault import Fault, Faults, death_of
from holdfast.core.job.job_state import Job
from holdfast.core.job.situation import CONSEQUENCES

LEFT = "left with code 0 while others computed"


def missed(now: float, job: Job, faults: Faults, fault: Fault) -> list[Fault]:
    """The deaths that explain ``fault``, if it is the first and one that a lost peer causes; ``now`` as in the
    controller."""
    if faults.all:
        return []
    lost_peer = fault.failure is not None and fault.failure.kind in CONSEQUENCES
    return leavers(now, job, faults) if lost_peer or fault.kind == "collective" else []


def leavers(now: float, job: Job, faults: Faults) -> list[Fault]:
    """Processes that ended with code 0 and were not taken for a fault, as faults."""
    found = []
    for member in job.roster.dead:
        exited = member.exited
        if exited is None or exited.code != 0 or exited.signal or member.finished or faults.blames(member):
            continue
        failure = death_of(now, member, exited, LEFT, job.roster.generation)
        found.append(Fault.of(member, "exit", LEFT, now, failure))
    return found
