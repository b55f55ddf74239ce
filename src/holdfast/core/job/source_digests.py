"""The digests that the sources of a state send before the state is saved or given to replacements.

A *source* is a rank that holds the state of the decided step.

Invariants:
1. The comparison becomes complete exactly once: with the report of the last source that was asked.
"""

from __future__ import annotations

from collections.abc import Iterable

from holdfast.core.protocol.health_messages import StateDigests


class SourceDigests:
    """The part of :class:`~holdfast.core.job.recovery.Recovery` that collects the digests of the sources."""

    def __init__(self) -> None:
        self.awaited: set[int] = set()  # sources that have not reported
        self.by_rank: dict[int, StateDigests] = {}

    def ask(self, sources: Iterable[int]) -> None:
        """Begin a new comparison that waits for the digests of these ranks."""
        self.awaited, self.by_rank = set(sources), {}

    def report(self, rank: int, digests: StateDigests) -> bool:
        """Record the digests of a source. Return True if all sources have now reported."""
        if rank not in self.awaited:
            return False
        self.awaited.discard(rank)
        self.by_rank[rank] = digests
        return not self.awaited
