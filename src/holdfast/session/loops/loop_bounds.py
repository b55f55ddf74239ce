"""Where a loop over steps ends: at the same step on all ranks, whoever has come into it later.

Theory. ``until`` may be counted from where the process stands (``until=s.step + 1000``, one loop per phase). A process
that comes into an open loop stands further on than those that opened it, so its number is another one, and alone it
would leave the loop later. So a loop's bound, the step at which it began and the one at which it ends, is part of
the place of the job: a process of the same run takes the end from there when its own number is the same distance away.
Any other number means that the script counts its loops in another way, and this loop is not the one that is open.

A script that resumes as it did before Holdfast (``for epoch in range(s.step // steps_per_epoch, epochs)``) leaves out
the loops that are over. Loops are counted, so its first one would be taken for one of those and yield nothing, what
stands behind it (an evaluation, a scheduler's step) would be done in the middle of an epoch, and each further loop
would stand for the one before it. Its first end gives it away: ahead of the job, and not as far as that of the first
loop was.
"""

from __future__ import annotations

import logging
from enum import Enum

from holdfast.errors import ProtocolError, UsageError
from holdfast.frameworks.common.adapter import StateAdapter
from holdfast.runtime.worker.worker_client import WorkerClient
from holdfast.store.format.json_values import decode_values, encode_values
from holdfast.store.format.manifest import attempt_key
from holdfast.text import plural

log = logging.getLogger("holdfast")

Bound = tuple[int, int | None]
"""Steps at which a loop began, and at which it ends; None: with its data."""

ADVICE = "give until= a number that does not depend on s.step: s.steps(loader, until=(phase + 1) * 1000)"

FROM_THE_FIRST = (
    "begin with the first loop at each start, those that are over yield nothing: "
    "for epoch in s.epochs(N): for step in s.steps(loader): ..."
)
ENDLESS = 2**62
"""A loop without data until then has no end of its own: a framework leaves it where its state says so, in a newcomer,
too."""


class LoopMembers(Enum):
    """Who was in the loop before this process."""

    SURVIVORS = "survivors"  # they are in it now
    THIS_RUN = "this run"  # all of its processes have started again
    ANOTHER_JOB = "another job"  # its checkpoint is gone on from: another end may be meant


def before_of(name: str, run: str, *, joining: bool) -> LoopMembers:
    """Who was in the loop before a process of ``run`` that goes on from what is called ``name``."""
    if joining:
        return LoopMembers.SURVIVORS
    key = attempt_key(name)
    return LoopMembers.THIS_RUN if key is None or key[4] == run else LoopMembers.ANOTHER_JOB


def bound_of(
    loop: int, here: int, until: int | None, saved: Bound, before: LoopMembers, *, anew: bool = False
) -> Bound:
    """The bound of a loop that was open when its place was taken.

    Args:
        loop: its number in the script.
        here: step at which this process comes into it.
        until: as the script says here.
        saved: the bound in the place.
        anew: the end of the first loop seemed to be counted from here (:func:`counted_anew`).

    Raises:
        UsageError: survivors are in it, and end it elsewhere; or it is another loop after all.
    """
    began, end = saved
    if until == end:
        return saved
    counted = until is not None and end is not None and until - here == end - began
    if counted and before is not LoopMembers.ANOTHER_JOB:
        log.info("holdfast: the loop over steps ends at %s, as it did when it began at step %d", end, began)
        return saved
    ends = f"loop {loop} of the script ended at step {end} before, and would end at step {until} here"
    if before is LoopMembers.SURVIVORS:
        raise UsageError(f"{ends} (at step {here}): the other ranks are still in it", hint=ADVICE)
    if anew and not counted and here in saved:
        raise UsageError(
            f"{ends} (at step {here})", hint=FROM_THE_FIRST
        )  # the first one was not counted either
    if counted and end is not None and here < end:
        log.warning("holdfast: %s; if that is not meant, %s", ends, ADVICE)
    elif before is LoopMembers.THIS_RUN:
        log.warning("holdfast: %s; %s", ends, ADVICE)
    return began, until


def counted_anew(here: int, until: int | None, first: Bound) -> bool:
    """Whether the end of the script's first loop, which the job has behind it, is counted from where it stands.

    Args:
        here: step at which this process stands.
        until: as the script says here.
        first: the bound that the first loop of the job had.

    Raises:
        UsageError: it is neither that nor the end it had: the script has begun with a later loop.
    """
    began, end = first
    if until is None or end is None or until in (end, ENDLESS) or until <= here:
        return False
    if until - here != end - began:
        raise UsageError(
            f"the first loop of the script had its end at step {end} before, and has it at step {until} here "
            f"(at step {here})",
            hint=FROM_THE_FIRST,
        )
    return True


def compare_bounds(
    client: WorkerClient | None, rank: int, world_size: int, loop: int, end: int | None
) -> None:
    """Compare with what the first rank that opened this loop has.

    Raises:
        UsageError: its loop ends at another step.
    """
    if client is None or world_size == 1:
        return
    reply = client.kv("compare_set", (f"holdfast/until/{loop}",), value=encode_values([rank, end], "bound"))
    if reply.error:
        log.warning("holdfast: the ends of the ranks' loops were not compared: %s", reply.error)
        return
    words = decode_values(reply.value, "bound of another rank")
    if not isinstance(words, list) or len(words) != 2:
        raise ProtocolError("another rank said nonsense of its loop")
    other, theirs = words
    if theirs != end:
        raise UsageError(
            f"loop {loop} of the script ends at step {end} on rank {rank}, and at step {theirs} on rank {other}",
            hint="give every rank the same until=, not one that its own data or clock says",
        )


def compare_turns(
    client: WorkerClient | None, adapter: StateAdapter, way: str, kind: str, turns: int
) -> None:
    """Compare with what the first rank that came to this part of the script has.

    Raises:
        UsageError: it has another number of turns.
    """
    if client is None or adapter.world_size == 1:
        return
    words = encode_values([kind, turns], "turns")
    reply = client.kv("compare_set", (f"holdfast/turns/{way}",), value=words)
    if not reply.error and reply.value != words:
        raise UsageError(
            f"{kind} has {plural(turns, 'turn')} on rank {adapter.rank}, and another rank has another number",
            hint="give every rank the same s.epochs(N) and s.phase(name), in the same order",
        )
