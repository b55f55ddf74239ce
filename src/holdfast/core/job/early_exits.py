"""Processes that ended with code 0 while other ranks still compute.

Theory. Without a session an end with code 0 is not a fault: the ranks of a script may end one after the other. It
becomes a fault when another rank loses a peer or hangs in a collective, because the ended process is the missing
peer. The exit is then reported as the fault, before the fault of the rank that missed its peer.

Invariants:
1. An exit with code 0 is reported as a fault at most once, and only as the cause of another rank's fault.
"""

from __future__ import annotations

from holdfast.core.job.fault import Fault, Faults, death_of
from holdfast.core.job.job_state import Job
from holdfast.core.job.situation import CONSEQUENCES

LEFT = "left with code 0 while others computed"


def missed(now: float, job: Job, faults: Faults, fault: Fault) -> list[Fault]:
    """Return the exits with code 0 that explain ``fault``.

    ``fault`` must be the first fault, and the loss of a peer must be able to cause it. ``now`` is in seconds on the
    clock of the controller.
    """
    if faults.all:
        return []
    lost_peer = fault.failure is not None and fault.failure.kind in CONSEQUENCES
    return leavers(now, job, faults) if lost_peer or fault.kind == "collective" else []


def leavers(now: float, job: Job, faults: Faults) -> list[Fault]:
    """Return a fault for each process that ended with code 0 and has no fault yet.

    ``now``: seconds, controller's clock.
    """
    found = []
    for member in job.roster.dead:
        exited = member.exited
        if exited is None or exited.code != 0 or exited.signal or member.finished or faults.blames(member):
            continue
        failure = death_of(now, member, exited, LEFT, job.roster.generation)
        found.append(Fault.of(member, "exit", LEFT, now, failure))
    return found
