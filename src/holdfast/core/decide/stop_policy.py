"""The facts and the history of faults, and the rules that end a run although the ladder has an answer to its fault.

Theory. The verdict (the answer to a fault) is a pure function of the situation after all ranks have settled, the
history of this run and the budget of restarts. The rules of this module come first, then the rungs (possible answers)
of ``core/decide/ladder.py``. A verdict names its evidence, so that a user can check the verdict by hand.

Invariants:
1. A stop verdict comes only from evidence in the situation or the history, never from a guess.
2. Committed work is never thrown away silently: when steps are lost, the reason names why no last-gasp checkpoint was
   possible.
3. Training starts with fresh weights only if no step was committed yet, or if the script has no session (then no step
   is known).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Literal

import msgspec

from holdfast.core.config import Config
from holdfast.exit_codes import Exit

Action = Literal[
    "retry_in_place",
    "replace",
    "replace_from_memory",
    "restart_last_gasp",
    "restart_from_memory",
    "restart_checkpoint",
    "restart_fresh",
    "requeue",
    "stop_user_bug",
    "stop_bad_input",
    "stop_budget",
]

STOP_CODE: dict[str, Exit] = {
    "stop_user_bug": Exit.FAILED,
    "stop_bad_input": Exit.BAD_INPUT,
    "stop_budget": Exit.BUDGET,
}

DETERMINISTIC_KINDS = frozenset(
    {"SyntaxError", "IndentationError", "TabError", "ImportError", "ModuleNotFoundError", "NameError"}
)
"""Exceptions that recur at the next start. Before any session has opened they end the run at once."""


SAME_IN_A_ROW = 3
STEPS_APART = 2

HANG = "Hang"
"""``Failure.kind`` of a process that was killed because its own code made no progress."""


CORRUPTION = "CopiesDiffer"
"""``Failure.kind`` of a rank whose copy of the state differs from the copies of other ranks."""


UNMATCHED = "UnmatchedCollectiveError"
"""``Failure.kind`` of a replacement whose collectives between two steps are not those of the other ranks."""


DEATH = "Death"
"""``Failure.kind`` of a process that ended without a report: by a signal, or with an exit code."""


_FROM_THE_TOP = (
    "\nnext: a process that joins or restarts runs the script from its top: does it leave there because of a file or "
    'directory of the first start? holdfast.once("directory", make) gives it the value of that start'
)
_WHAT = {DEATH: "death", HANG: "hang", CORRUPTION: "difference between copies of the state"}


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """The exception, hang or death of one rank that caused a fault.

    The consequences of a lost peer are not failures.
    """

    rank: int
    step: int
    kind: str
    what: str
    digest: str
    # Packed generation of the failure: a new controller may receive the same failure again.
    occurrence: int = 0
    user_error: bool = False
    between: bool = False  # raised between two steps
    # Certainly caused by a device, or another device can be tried: no bug of the script.
    by_device: bool = False
    times_max: int = 2  # the run ends when the failure has happened this many times at the same step

    @property
    def mark(self) -> tuple[str, int, int]:
        """The part of the failure that the history of faults keeps: its digest, its step and the packed generation."""
        return self.digest, self.step, self.occurrence

    @property
    def line(self) -> str:
        """The failure as a line of evidence. Further lines of an error follow it."""
        return f"rank {self.rank} at step {self.step}: {self.kind}: {self.what}"


class Answered(msgspec.Struct, frozen=True, kw_only=True):
    """One earlier fault of the run that was answered by a recovery."""

    at_s: float
    action: str
    step: int
    failures: tuple[tuple[str, int, int], ...] = ()  # ``Failure.mark`` of each failure of the fault


class Situation(msgspec.Struct, frozen=True, kw_only=True):
    """The facts from which the answer to a fault is chosen, after all ranks of the old generation have settled."""

    step: int | None  # step of the job; None: no session has reported any
    base_step: int  # step at which this generation started
    session: bool  # a session has been opened in this run
    all_alive: bool  # every member lives
    all_sound: (
        bool  # every member lives, is at ``step`` or can be brought there, and has not finished before others
    )
    # Why lost ranks cannot be replaced while the others keep their processes; empty: they can.
    unreplaceable: str
    apart: str = ""  # why the ranks cannot continue together in their processes; empty: they can
    uncovered: str  # why a last-gasp checkpoint cannot be complete; empty: it can
    checkpoint_known: bool  # this run knows of a sealed checkpoint, or one is being written
    minority: bool = False  # no majority of the agents is reached: this side saves and leaves
    left: bool = False  # all ranks have agreed to leave at ``step``, and it is saved
    unequal: str = ""  # why no state of the living is trusted; empty: it is trusted
    # Step of the states in memory from which lost ranks can be replaced in place; -1: none.
    memory_here: int = -1
    memory_step: int = -1  # step of the states in memory from which all ranks can start again; -1: none
    # Lost ranks can be replaced in place: their state follows from a log of updates in memory.
    replayed: bool = False
    failures: tuple[Failure, ...] = ()
    room: str = ""  # text if the nodes have room for more ranks than run now; empty: they have not
    # Text if the remaining nodes have room only for fewer ranks, and fewer are allowed; empty otherwise.
    fewer: str = ""
    lost_nodes: tuple[str, ...] = ()  # nodes of lost ranks that are also lost
    causes: tuple[str, ...] = ()  # of the faults of this recovery, see ``ladder.CAUSES``
    planned: bool = False  # no fault: ranks are moved
    again: bool = False  # all faults were answered before, but the save of that answer has failed
    exits: str = ""  # the request to leave that is in force; empty: none


class LadderVerdict(msgspec.Struct, frozen=True, kw_only=True):
    """The chosen answer to a fault (the rung of the ladder) and its reason.

    ``save``: write a last-gasp checkpoint first.
    """

    action: Action
    reason: str
    evidence: tuple[str, ...] = ()
    save: bool = False
    memory_step: int = -1  # the step of the states in memory that are used
    # The step ``memory_step`` is reached from a log of updates, and the living ranks stay at their step.
    replays: bool = False
    rung: str = ""  # name of the chosen rung; empty: the run stops
    counts: bool = True  # counts against the budget, because it answers a fault
    refused: tuple[str, ...] = ()  # why the rungs before the chosen rung were refused

    @property
    def stops(self) -> bool:
        """True if this verdict ends the run."""
        return self.action in STOP_CODE


def stop_for(
    now: float, situation: Situation, history: Sequence[Answered], config: Config
) -> LadderVerdict | None:
    """Return the verdict that ends the run although a rung could answer the fault; None if the run continues."""
    return _stop_for_failures(situation, history) or _stop_for_budget(now, history, config)


def _stop_for_failures(situation: Situation, history: Sequence[Answered]) -> LadderVerdict | None:
    for failure in situation.failures:
        error = failure.what if failure.kind == DEATH else f"{failure.kind}: {failure.what}"
        where = f"rank {failure.rank} at step {failure.step}: {error}"
        what = _WHAT.get(failure.kind, "exception")
        if failure.user_error:
            return LadderVerdict(action="stop_bad_input", reason=error, evidence=(where,))
        if not situation.session and failure.kind in DETERMINISTIC_KINDS:
            return LadderVerdict(
                action="stop_user_bug", reason=f"{error} (before any session)", evidence=(where,)
            )
        if failure.by_device:
            continue
        if failure.kind == UNMATCHED:
            if _answers_the_same(failure, history):
                return LadderVerdict(action="stop_bad_input", reason=error, evidence=(where,))
            continue
        before = {
            occurrence
            for answered in history
            for digest, step, occurrence in answered.failures
            if (digest, step) == (failure.digest, failure.step) and occurrence != failure.occurrence
        }
        if len(before) + 1 >= failure.times_max:
            times = "twice" if len(before) == 1 else f"{len(before) + 1} times"
            at = f"at step {failure.step} {times}"
            job_step = max(situation.step or 0, situation.base_step, *(answered.step for answered in history))
            if situation.session and failure.step == 0 < job_step:
                at = f"{times} in a process that had not reached the state of the job (at step {job_step})"
                error += _FROM_THE_TOP
            return LadderVerdict(
                action="stop_user_bug",
                reason=f"the same {what} {at}: {error}",
                evidence=(where, f"digest {failure.digest}"),
            )
        if failure.kind == DEATH:
            continue
        if steps := _at_the_next_step(failure, history) or _again_and_again(failure, history):
            return LadderVerdict(
                action="stop_user_bug",
                reason=f"the same {what} at steps {', '.join(map(str, steps))}: {error}",
                evidence=(where, f"digest {failure.digest}"),
            )
    return None


def _answers_the_same(failure: Failure, history: Sequence[Answered]) -> bool:
    """Return whether ``failure`` also caused the last recovery, so that a further recovery would not help."""
    for answered in reversed(history):
        told = {occurrence for digest, _, occurrence in answered.failures if digest == failure.digest}
        if told != {failure.occurrence}:  # otherwise a recovery of this very failure was interrupted
            return bool(told)
    return False


def _at_the_next_step(failure: Failure, history: Sequence[Answered]) -> list[int]:
    """Return the two steps at which the same exception was raised: before the last recovery, and right after it.

    Return an empty list if the exception was raised inside a block, or did not recur at once. After a restart, code
    between two steps does not run again at the same step, so a bug in that code recurs one step later.
    """
    if not failure.between or not history or failure.step > history[-1].step + 1:
        return []
    before = [
        step
        for answered in history
        for digest, step, occurrence in answered.failures
        if answered.step == history[-1].step and digest == failure.digest and occurrence != failure.occurrence
    ]
    return [max(before), failure.step] if before else []


def _again_and_again(failure: Failure, history: Sequence[Answered]) -> list[int]:
    """Return the steps at which the same exception caused the last recoveries, if it caused ``SAME_IN_A_ROW`` of them.

    Return an empty list if it caused fewer in a row, or at steps that are more than ``STEPS_APART`` apart.
    """
    steps, told = [failure.step], {failure.occurrence}
    for answered in reversed(history):
        found = [
            (step, occurrence) for digest, step, occurrence in answered.failures if digest == failure.digest
        ]
        if found and told.issuperset(occurrence for _, occurrence in found):
            continue  # the same failure, which a new controller received again
        if not found or len(steps) == SAME_IN_A_ROW:
            break
        told.update(occurrence for _, occurrence in found)
        steps.insert(0, max(found)[0])
    if len(steps) < SAME_IN_A_ROW:
        return []
    near = all(0 <= later - earlier <= STEPS_APART for earlier, later in pairwise(steps))
    return steps if near else []


def _stop_for_budget(now: float, history: Sequence[Answered], config: Config) -> LadderVerdict | None:
    recent = [a for a in history if now - a.at_s < config.restart_window_s]
    if len(recent) < config.max_restarts:
        return None
    return LadderVerdict(
        action="stop_budget",
        reason=f"{len(recent)} recoveries within {config.restart_window_s:g} s, {config.max_restarts} are allowed",
        evidence=tuple(f"{now - a.at_s:.1f} s ago: {a.action} at step {a.step}" for a in recent[-5:]),
    )
