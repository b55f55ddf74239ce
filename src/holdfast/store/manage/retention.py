"""Policies for when to save and which checkpoints to keep, as small pure objects.

Theory. A retention policy selects, from the valid checkpoints (newest first) and their ages, the paths to keep. Several
policies together keep each checkpoint that any of them keeps, and the root always keeps the newest. The save interval
is a trade: every save delays training, every fault costs the work since the last save. Young's first-order optimum is
sqrt(2 x cost of a save x mean time between faults).

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
"""Mean time between faults in seconds that is assumed at the start of a job."""


AgeOf = Callable[[str], float]
"""Function that returns the seconds since the attempt of this name was written."""
KeepPolicy = Callable[[Sequence[Validity], AgeOf], set[str]]
"""Function from the valid checkpoints (newest first) and their ages to the paths to keep."""


class KeepNewest(msgspec.Struct, frozen=True):
    """A policy that keeps the newest ``count`` checkpoints."""

    count: int

    def __post_init__(self) -> None:
        if self.count < 1:
            raise UsageError(
                f"keep={self.count}: at least the newest valid checkpoint is always kept",
                hint="keep 1 or more",
            )

    def __call__(self, valid: Sequence[Validity], age_s: AgeOf) -> set[str]:
        """Return the paths of the newest ``count`` checkpoints."""
        return {v.path for v in valid[: self.count]}


class KeepEvery(msgspec.Struct, frozen=True):
    """A policy that keeps for ever the first checkpoint at or after each full multiple of ``steps``."""

    steps: int

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise UsageError(
                f"every={self.steps} is no number of steps",
                hint="1000 keeps one checkpoint of every 1000 steps; leave it out for none of them",
            )

    def __call__(self, valid: Sequence[Validity], age_s: AgeOf) -> set[str]:
        """Return the paths of the first checkpoints at or after each multiple of ``steps``."""
        first: dict[int, Validity] = {}
        for found in valid:  # newest first, so the oldest of each interval is kept last
            first[found.step // self.steps] = found
        return {v.path for v in first.values()}


class KeepFor(msgspec.Struct, frozen=True):
    """A policy that keeps each checkpoint for ``duration_s`` seconds."""

    duration_s: float

    def __post_init__(self) -> None:
        if self.duration_s <= 0:
            raise UsageError(f"keep={self.duration_s:g} s: nothing is kept", hint="a duration above 0")

    def __call__(self, valid: Sequence[Validity], age_s: AgeOf) -> set[str]:
        """Return the paths of the checkpoints that are younger than ``duration_s`` seconds."""
        return {v.path for v in valid if age_s(v.name) < self.duration_s}


class KeepAny(msgspec.Struct, frozen=True):
    """A policy that keeps every checkpoint that any of several policies keeps."""

    policies: tuple[KeepPolicy, ...]

    def __call__(self, valid: Sequence[Validity], age_s: AgeOf) -> set[str]:
        """Return the paths that any of the policies keeps."""
        return set().union(*(policy(valid, age_s) for policy in self.policies))


OneKept = int | timedelta | KeepPolicy
Kept = OneKept | Sequence[OneKept]
"""Type of ``holdfast.session(keep=...)``; see :func:`retention`."""


def retention(given: object) -> KeepAny:
    """Return the policy for a value of ``keep``: a number, a ``timedelta``, a policy, or several of these.

    A number n keeps the n newest checkpoints. A ``timedelta`` keeps the checkpoints that are younger than it.

    Raises:
        UsageError: the value is of another kind, or an impossible number.
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
    """Return Young's interval between saves in seconds, which minimizes the lost time of a job.

    Args:
        stall_s: seconds by which one save delays training (not its duration in the background).
        mean_time_between_faults_s: mean seconds between two faults of the whole job.

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
    """The facts on which a save policy decides, when the ranks vote on a step.

    Attributes:
        step: the number of updates, this step included. A save would get this number as its step.
        since_steps, since_s: steps and seconds since the last save (or the start of the session).
        stall_s: seconds by which a recent save delayed training; 0 before the first save.
        durable_s: seconds until a recent save was on disk; 0 before the first save.
        faults: number of faults of this run.
        run_s: duration of this run in seconds.
    """

    step: int
    since_steps: int
    since_s: float
    stall_s: float = 0.0
    durable_s: float = 0.0
    faults: int = 0
    run_s: float = 0.0


SavePolicy = Callable[[Moment], bool]
"""Function that returns True when a save is due. Every rank calls it at every step.

True on one rank is enough, because the vote reports it to all ranks. While the previous save is in progress, the save
is delayed. So a policy must return True until the save was made.
"""

OneSaveWhen = SavePolicy | int | timedelta | Literal["auto"]
SaveWhen = OneSaveWhen | Sequence[OneSaveWhen] | None
"""Type of ``holdfast.session(save=...)``; see :func:`save_policies`."""


class EverySteps(msgspec.Struct, frozen=True):
    """A policy that saves at each full multiple of ``count`` updates."""

    count: int

    def __post_init__(self) -> None:
        if self.count < 1:
            raise UsageError(
                f"EverySteps({self.count}): must be 1 or more", hint="leave it out for no periodic saves"
            )

    def __call__(self, now: Moment) -> bool:
        """Return True if a multiple of ``count`` was reached or passed since the last save."""
        return now.step // self.count > (now.step - now.since_steps) // self.count


class EverySeconds(msgspec.Struct, frozen=True):
    """A policy that saves when the last save is ``interval_s`` seconds old."""

    interval_s: float

    def __post_init__(self) -> None:
        if self.interval_s <= 0:
            raise UsageError(
                f"EverySeconds({self.interval_s}): must be above 0", hint="leave it out for no periodic saves"
            )

    def __call__(self, now: Moment) -> bool:
        """Return True if the last save is ``interval_s`` seconds old."""
        return now.since_s >= self.interval_s


class BestInterval(msgspec.Struct, frozen=True, kw_only=True):
    """A policy that saves at Young's optimal interval, from the measured delay by a save and the time between faults.

    If ``mean_time_between_faults_s`` is None, it is estimated as (1 day + duration of the run) / (1 + number of
    faults). The estimate starts with one fault a day. The interval is never shorter than the disk needs for a save, nor
    than ``shortest_s`` seconds. The first save is made after ``shortest_s``, and measures the cost of a save.
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
        """Return the seconds between two saves, from the measurements in ``now``."""
        between_s = self.mean_time_between_faults_s or (ASSUMED_S + now.run_s) / (1 + now.faults)
        best_s = best_interval_s(now.stall_s, between_s) if now.stall_s > 0 else 0.0
        return max(best_s, now.durable_s, self.shortest_s)

    def __call__(self, now: Moment) -> bool:
        """Return True if the last save is at least as old as the best interval."""
        return now.since_s >= self.interval_s(now)


def save_policies(given: object, every_steps: int | None, every_s: float | None) -> tuple[SavePolicy, ...]:
    """Return the policies for the arguments of a session. Without policies, a session saves only on request.

    Args:
        given: None, a number of steps, a ``timedelta``, ``"auto"`` (:class:`BestInterval`), a policy, or several of
            these.
        every_steps: adds the policy to save after each such number of steps; None adds no policy.
        every_s: adds the policy to save after each such number of seconds; None adds no policy.

    Raises:
        UsageError: a value is of another kind.
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
