"""The ends of loops over steps: a loop must end at the same step on all ranks, even on a rank that joins it later.

Theory. A script may count ``until`` from the current step (``until=s.step + 1000``, one loop per phase). A process
that joins an open loop is at a later step than the other processes were when they opened it. Its ``until`` is then
larger, and it would leave the loop later than they do. So the place of the job holds the *bound* of the loop: the
steps at which the loop began and ends. A process of the same run uses this end if the distance from its current step
to its own ``until`` equals the length of the loop. Any other ``until`` means that the script counts its loops in
another way, and that this is not the open loop.

A script may also resume as it did before Holdfast (``for epoch in range(s.step // steps_per_epoch, epochs)``), and
leave out the finished loops. Loops are identified by their number. So the first loop of such a script would be taken
for a finished one, and yield nothing. The code after this loop (an evaluation, a scheduler's step) would run in the
middle of an epoch. Each further loop would be taken for the loop before it. So the end of the script's first loop is
compared with the bound of the job's first loop. In such a script this end is after the current step, but at another
distance from it than the length of the job's first loop.
"""

from __future__ import annotations

import logging
from enum import Enum

from holdfast.errors import UsageError
from holdfast.frameworks.common.adapter import StateAdapter
from holdfast.runtime.worker.published_values import first_published
from holdfast.runtime.worker.worker_client import WorkerClient
from holdfast.store.format.manifest import attempt_key
from holdfast.text import plural

log = logging.getLogger("holdfast")

Bound = tuple[int, int | None]
"""Steps at which a loop began and ends; None in place of the end: the loop ends with its data."""

ADVICE = "give until= a number that does not depend on s.step: s.steps(loader, until=(phase + 1) * 1000)"

FROM_THE_FIRST = (
    "begin with the first loop at each start, those that are over yield nothing: "
    "for epoch in s.epochs(N): for step in s.steps(loader): ..."
)
ENDLESS = 2**62
"""End of a loop without data that a framework drives. The framework itself decides when to leave that loop."""


class LoopMembers(Enum):
    """The processes that were in the open loop of the loaded state before this process."""

    SURVIVORS = "survivors"  # surviving processes of this run, which are in the loop now
    THIS_RUN = "this run"  # processes of this run, all of which have started again
    ANOTHER_JOB = "another job"  # processes of an earlier run; the script of this run may intend another end


def before_of(name: str, run: str, *, joining: bool) -> LoopMembers:
    """Return which processes were in the open loop of the loaded state before this process.

    Args:
        name: directory name of the loaded checkpoint, or of another source of the state.
        run: id of this run.
        joining: this process replaces a lost rank of a running job.
    """
    if joining:
        return LoopMembers.SURVIVORS
    key = attempt_key(name)
    return LoopMembers.THIS_RUN if key is None or key[4] == run else LoopMembers.ANOTHER_JOB


def bound_of(
    loop: int,
    here: int,
    until: int | None,
    saved: Bound,
    before: LoopMembers,
    *,
    counts_from_here: bool = False,
) -> Bound:
    """Return the bound (steps of start and end), in this process, of a loop that was open in the loaded state.

    Args:
        loop: number of the loop in the script.
        here: step at which this process begins the loop.
        until: the argument ``until`` of the script in this process.
        saved: the bound in the loaded state.
        before: the processes that were in the loop before this one.
        counts_from_here: the end of the first loop seemed to be counted from ``here`` (:func:`counted_from_here`).

    Raises:
        UsageError: survivors in the loop end it at another step, or the script did not begin with its first loop.
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
    if counts_from_here and not counted and here in saved:
        # The script counts neither loop from the current step.
        raise UsageError(f"{ends} (at step {here})", hint=FROM_THE_FIRST)
    if counted and end is not None and here < end:
        log.warning("holdfast: %s; if that is not meant, %s", ends, ADVICE)
    elif before is LoopMembers.THIS_RUN:
        log.warning("holdfast: %s; %s", ends, ADVICE)
    return began, until


def counted_from_here(here: int, until: int | None, first: Bound) -> bool:
    """Return whether the script counts ``until`` of its first loop from the current step.

    The job has finished the first loop.

    Args:
        here: the current step.
        until: the argument ``until`` of the first loop in this process.
        first: the steps at which the first loop of the job began and ended.

    Raises:
        UsageError: ``until`` is after ``here``, but is not the end of ``first``, and its distance from ``here`` is not
            the length of ``first``. The script has begun with a later loop.
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
    """Compare the end of a loop with the end on the rank that opened the loop first.

    Args:
        loop: number of the loop in the script.
        end: step at which the loop ends on this rank; None if it ends with its data.

    Raises:
        UsageError: the loop ends at another step on this rank.
    """
    peers = client if world_size > 1 else None
    what = "the ends of the ranks' loops were"
    other, theirs = first_published(peers, f"holdfast/until/{loop}", [rank, end], what)
    if theirs != end:
        raise UsageError(
            f"loop {loop} of the script ends at step {end} on rank {rank}, and at step {theirs} on rank {other}",
            hint="give every rank the same until=, not one computed from its own data or clock",
        )


def compare_turns(
    client: WorkerClient | None, adapter: StateAdapter, way: str, kind: str, turns: int
) -> None:
    """Compare kind and number of turns of a part with those on the rank that reached the part first.

    Args:
        way: key of the part, see ``turn_position.py``.
        kind: ``epochs``, or ``phase`` with its name.
        turns: number of turns on this rank.

    Raises:
        UsageError: the first rank has another kind or number of turns.
    """
    peers = client if adapter.world_size > 1 else None
    what = "the epochs and phases of the ranks were"
    theirs, number = first_published(peers, f"holdfast/turns/{way}", [kind, turns], what)
    if [theirs, number] != [kind, turns]:
        raise UsageError(
            f"{kind} has {plural(turns, 'turn')} on rank {adapter.rank}, and another rank has {theirs} with "
            f"{plural(number, 'turn')}",
            hint="give every rank the same s.epochs(N) and s.phase(name), in the same order. N is the number of all "
            "epochs of the job, also in a process that joins or resumes: not s.epochs(N - start_epoch)",
        )
