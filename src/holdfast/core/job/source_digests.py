"""The digests that the sources of a decision send of the state that they hold, before it is saved or given.

Invariants:
1. The comparison is complete once: with the report of the last source that was asked.
"""

from __future__ import annotations

from collections.abc import Iterable

from holdfast.core.protocol.health_messages import StateDigests


class SourceDigests:
    """Part of :class:`~holdfast.core.job.recovery.Recovery`."""

    def __init__(self) -> None:
        self.awaited: set[int] = set()  # sources that have not reported
        self.by_rank: dict[int, StateDigests] = {}

    def ask(self, sources: Iterable[int]) -> None:
        """Forget an earlier comparison; these ranks are asked."""
        self.awaited, self.by_rank = set(sources), {}

    def report(self, rank: int, digests: StateDigests) -> bool:
        """Note the digests of a source. Returns: True when no other one is awaited."""
        if rank not in self.awaited:
            return False
        self.awaited.discard(rank)
        self.by_rank[rank] = digests
        return not self.awaited
