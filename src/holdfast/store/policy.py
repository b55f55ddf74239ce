"""When to save and what to keep, as small pure objects.

Theory. A retention policy maps the valid checkpoints (newest first) to the paths that stay; policies are joined by
union, and the root keeps the newest one whatever they say. How often to save is a trade: every save costs a stall,
every fault costs the work since the last save; Young's first-order optimum is sqrt(2 x cost x mean time between
faults).

Invariant: nothing here looks at a clock or a file.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from holdfast.errors import UsageError
from holdfast.store.validity import Validity


class KeepNewest(msgspec.Struct, frozen=True):
    """Keep the newest ``count`` checkpoints."""

    count: int

    def __call__(self, valid: Sequence[Validity]) -> set[str]:
        """Paths to keep."""
        return {v.path for v in valid[: self.count]}


class KeepEvery(msgspec.Struct, frozen=True):
    """Keep, for each full multiple of ``steps``, the first checkpoint at or after it (for good)."""

    steps: int

    def __call__(self, valid: Sequence[Validity]) -> set[str]:
        """Paths to keep."""
        first: dict[int, Validity] = {}
        for found in valid:  # newest first: the last one seen of a slot is its oldest
            first[found.step // self.steps] = found
        return {v.path for v in first.values()}


class KeepAny(msgspec.Struct, frozen=True):
    """Keep what any of the policies keeps."""

    policies: tuple[KeepNewest | KeepEvery, ...]

    def __call__(self, valid: Sequence[Validity]) -> set[str]:
        """Paths to keep."""
        return set().union(*(policy(valid) for policy in self.policies))


def retention(keep: int, every_steps: int = 0) -> KeepAny:
    """The newest ``keep`` and, with ``every_steps`` > 0, one per that many steps.

    Raises:
        UsageError: a number that cannot mean anything.
    """
    if keep < 1 or every_steps < 0:
        raise UsageError(
            f"keep={keep}, every={every_steps}: at least one is kept, and a distance is positive"
        )
    return KeepAny((KeepNewest(keep), *((KeepEvery(every_steps),) if every_steps else ())))


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
            f"stall {stall_s} s and time between faults {mean_time_between_faults_s} s must be positive"
        )
    return math.sqrt(2 * stall_s * mean_time_between_faults_s)
