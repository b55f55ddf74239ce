"""When to save and what to keep, as small pure objects.

Theory. A retention policy maps the valid checkpoints (newest first) and their ages to the paths that stay; policies are
joined by union, and the root keeps the newest one whatever they say. How often to save is a trade: every save costs a
stall, every fault costs the work since the last save; Young's first-order optimum is sqrt(2 x cost x mean time between
faults).

Invariant: nothing here looks at a clock or a file.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Literal, SupportsIndex

import msgspec

from holdfast.errors import UsageError
from holdfast.store.read.validation import Validity

ASSUMED_S = 86_400.0
"""Time between faults of a job that nothing is known about."""


AgeOf = Callable[[str], float]
"""Seconds since the attempt of this name was written."""
KeepPolicy = Callable[[Sequence[Validity], AgeOf], set[str]]
"""Valid checkpoints (newest first) -> paths that stay."""


class KeepNewest(msgspec.Struct, frozen=True):
    """Keep the newest ``count`` checkpoints."""

    count: int

    def __post_init__(self) -> None:
        if self.count < 1:
            raise UsageError(
                f"keep={self.count}: at least the newest valid checkpoint is always kept",
                hint="keep 1 or more",
            )

    def __call__(self, valid: Sequence[Validity], age_s: AgeOf) -> set[str]:
        """Paths to keep."""
        return {v.path for v in valid[: self.count]}


class KeepEvery(msgspec.Struct, frozen=True):
    """Keep, for each full multiple of ``steps``, the first checkpoint at or after it (for good)."""

    steps: int

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise UsageError(
                f"every={self.steps} is no number of steps",
                hint="1000 keeps one checkpoint of every 1000 steps; leave it out for none of them",
            )

    def __call__(self, valid: Sequence[Validity], age_s: AgeOf) -> set[str]:
        """Paths to keep."""
        first: dict[int, Validity] = {}
        for found in valid:  # newest first: the last one seen of a slot is its oldest
            first[found.step // self.steps] = found
        return {v.path for v in first.values()}


class KeepFor(msgspec.Struct, frozen=True):
    """Keep each checkpoint for ``duration_s`` seconds."""

    duration_s: float

    def __post_init__(self) -> None:
        if self.duration_s <= 0:
            raise UsageError(f"keep={self.duration_s:g} s: nothing is kept", hint="a duration above 0")

    def __call__(self, valid: Sequence[Validity], age_s: AgeOf) -> set[str]:
        """Paths to keep."""
        return {v.path for v in valid if age_s(v.name) < self.duration_s}


class KeepAny(msgspec.Struct, frozen=True):
    """Keep what any of the policies keeps."""

    policies: tuple[KeepPolicy, ...]

    def __call__(self, valid: Sequence[Validity], age_s: AgeOf) -> set[str]:
        """Paths to keep."""
        return set().union(*(policy(valid, age_s) for policy in self.policies))


OneKept = int | timedelta | KeepPolicy
Kept = OneKept | Sequence[OneKept]
"""What ``holdfast.session(keep=...)`` takes; see :func:`retention`."""


def retention(given: object) -> KeepAny:
    """The policy that ``keep`` means: the newest so many, those of a ``timedelta``, a policy, or any of several.

    Raises:
        UsageError: something else, or a number that cannot mean anything.
    """
    items = given if isinstance(given, list | tuple) else (given,)
    return KeepAny(tuple(map(_kept, items)))


def _kept(item: object) -> KeepPolicy:
    if isinstance(item, SupportsIndex) and not isinstance(item, bool):
        return KeepNewest(operator.index(item))
    if isinstance(item, timedelta):
        return KeepFor(item.total_seconds())
    if callable(item):
        return item
    raise UsageError(
        f"keep={item!r}: not a policy",
        hint="keep=3 (the newest), keep=timedelta(days=1), keep=holdfast.KeepEvery(10_000), or a list of these",
    )


def best_interval_s(stall_s: float, mean_time_between_faults_s: float) -> float:
    """Young's interval between saves that costs a job the least time.

    Args:
        stall_s: how long one save delays training (not how long it takes in the background).
        mean_time_between_faults_s: of the whole job.

    Raises:
        UsageError: a duration that is not positive.
    """
    if stall_s <= 0 or mean_time_between_faults_s <= 0:
        raise UsageError(
            f"stall {stall_s} s and time between faults {mean_time_between_faults_s} s must be positive",
            hint="give both as they were measured, in seconds",
        )
    return math.sqrt(2 * stall_s * mean_time_between_faults_s)


class Moment(msgspec.Struct, frozen=True, kw_only=True):
    """What a save policy may know when the ranks vote on a step.

    ``step``: updates done once this step counts, the one that would be saved; ``since_*``: passed since the last save
    (or the start of the session); ``stall_s`` and ``durable_s``: measured on the last saves, 0 before the first one:
    how long one held up training, and how long it took until it was on disk; ``faults`` of this run in ``run_s``.
    """

    step: int
    since_steps: int
    since_s: float
    stall_s: float = 0.0
    durable_s: float = 0.0
    faults: int = 0
    run_s: float = 0.0


SavePolicy = Callable[[Moment], bool]
"""True when a save is due. Asked at every step, by every rank; one rank is enough, and the vote tells all. While the
save before is in flight the answer is put off: a policy says yes until the save was made."""

OneSaveWhen = SavePolicy | int | timedelta | Literal["auto"]
SaveWhen = OneSaveWhen | Sequence[OneSaveWhen] | None
"""What ``holdfast.session(save=...)`` takes; see :func:`save_policies`."""


class EverySteps(msgspec.Struct, frozen=True):
    """Save at each full multiple of ``count`` updates."""

    count: int

    def __post_init__(self) -> None:
        if self.count < 1:
            raise UsageError(
                f"EverySteps({self.count}): must be 1 or more", hint="leave it out for no periodic saves"
            )

    def __call__(self, now: Moment) -> bool:
        """Has a multiple been passed since the last save?"""
        return now.step // self.count > (now.step - now.since_steps) // self.count


class EverySeconds(msgspec.Struct, frozen=True):
    """Save when the last save is ``interval_s`` seconds old."""

    interval_s: float

    def __post_init__(self) -> None:
        if self.interval_s <= 0:
            raise UsageError(
                f"EverySeconds({self.interval_s}): must be above 0", hint="leave it out for no periodic saves"
            )

    def __call__(self, now: Moment) -> bool:
        """Is it?"""
        return now.since_s >= self.interval_s


class BestInterval(msgspec.Struct, frozen=True, kw_only=True):
    """Save as often as costs the least: Young's optimum of the measured stall against the time between faults.

    Without ``mean_time_between_faults_s`` that time is estimated from the run itself, beginning with the assumption of
    one fault a day: (1 day + duration of the run) / (1 + faults). Never more often than the disk can follow, nor than
    every ``shortest_s``; that is also when the first save is made, which measures what one costs.
    """

    mean_time_between_faults_s: float | None = None
    shortest_s: float = 30.0

    def __post_init__(self) -> None:
        if self.shortest_s <= 0 or (self.mean_time_between_faults_s or 1.0) <= 0:
            raise UsageError(
                f"BestInterval(mean_time_between_faults_s={self.mean_time_between_faults_s}, "
                f"shortest_s={self.shortest_s}): durations must be above 0",
                hint="leave out what is not known",
            )

    def interval_s(self, now: Moment) -> float:
        """Seconds between two saves, as things stand."""
        between_s = self.mean_time_between_faults_s or (ASSUMED_S + now.run_s) / (1 + now.faults)
        best_s = best_interval_s(now.stall_s, between_s) if now.stall_s > 0 else 0.0
        return max(best_s, now.durable_s, self.shortest_s)

    def __call__(self, now: Moment) -> bool:
        """Is the last save that old?"""
        return now.since_s >= self.interval_s(now)


def save_policies(given: object, every_steps: int | None, every_s: float | None) -> tuple[SavePolicy, ...]:
    """The policies that the arguments of a session mean; empty: only on request.

    Args:
        given: None, a number of steps, a ``timedelta``, ``"auto"``, a policy, or several of these.
        every_steps, every_s: the same in other words.

    Raises:
        UsageError: something else.
    """
    items = given if isinstance(given, list | tuple) else () if given is None else (given,)
    policies = [_save_policy(item) for item in items]
    if every_steps is not None:
        policies.append(EverySteps(every_steps))
    if every_s is not None:
        policies.append(EverySeconds(every_s))
    return tuple(policies)


def _save_policy(item: object) -> SavePolicy:
    if isinstance(item, int) and not isinstance(item, bool):
        return EverySteps(item)
    if isinstance(item, timedelta):
        return EverySeconds(item.total_seconds())
    if item == "auto":
        return BestInterval()
    if callable(item):
        return item
    raise UsageError(
        f"session(save={item!r}): not a policy",
        hint="save=500 (steps), save=timedelta(minutes=10), save='auto', or an object of holdfast.EverySteps, "
        "EverySeconds or BestInterval",
    )
