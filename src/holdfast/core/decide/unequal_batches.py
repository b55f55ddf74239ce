"""Ranks with unequal numbers of batches: one rank is at the end of its loop, another one in a further block of it.

Theory. All ranks make the same steps. A loop over steps ends on a rank when its loader has no more batch. If another
rank still has a batch, its block waits for gradients that never come, while the first rank continues with the code
after the loop. A collective of that code would meet the gradients of the block. So no rank leaves its loop before all
ranks are at the end of theirs (``session/steps/loop_ends.py``). Each rank answers a fence with its place in its loop.
Two answers prove the difference: one rank has ended its loop at a step, another rank has begun the block of that step
in the same loop. Another attempt would end in the same way, so the first proof ends the run.

Invariants:
1. Places are compared only within one loop and one step. Loops have the same numbers on all ranks.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from holdfast.core.decide.stop_policy import Failure
from holdfast.core.decide.unmatched_collectives import IN_BLOCK
from holdfast.core.ids import Generation
from holdfast.core.protocol.messages import LoopPlace, RankState
from holdfast.errors import UnequalBatchesError
from holdfast.text import plural

HINT = (
    "give every rank the same number of batches: DistributedSampler(dataset, drop_last=True) with "
    "DataLoader(..., drop_last=True), or let each rank leave out or repeat batches up to one agreed number. Or count "
    "steps: s.steps(loader, until=N) begins the loader of a rank again when it ends"
)


class RankPlace(NamedTuple):
    """The place of one rank in its loop after a fault. ``loop``: None if it has begun no loop."""

    rank: int
    state: RankState
    step: int
    loop: LoopPlace | None


def unequal(generation: Generation, ranks: Iterable[RankPlace]) -> Failure | None:
    """Return the proof that one rank has ended its loop, and another rank has a further batch.

    The result is None if there is no proof.

    Args:
        generation: the generation in which the ranks have run until the fault.
        ranks: the place of each rank.
    """
    ended: dict[tuple[int, int], RankPlace] = {}
    inside: dict[tuple[int, int], RankPlace] = {}
    for seen in ranks:
        if seen.loop is None:
            continue
        if seen.loop.ended_at >= 0:
            ended.setdefault((seen.loop.loop, seen.loop.ended_at), seen)
        elif seen.state in IN_BLOCK:
            inside.setdefault((seen.loop.loop, seen.step), seen)
    for key, first in ended.items():
        if (other := inside.get(key)) is not None:
            return _failure(generation, first, other)
    return None


def _failure(generation: Generation, first: RankPlace, other: RankPlace) -> Failure:
    """Return the failure of the job in which ``first`` has ended its loop, and ``other`` has a further batch."""
    assert first.loop is not None
    step, steps = first.loop.ended_at, first.loop.steps
    error = UnequalBatchesError(
        f"rank {first.rank} has no batch for step {step}, after {plural(steps, 'step')} of this loop, and rank "
        f"{other.rank} has one: the ranks have different numbers of batches",
        hint=HINT,
    )
    return Failure(
        rank=first.rank,
        step=step,
        kind=UnequalBatchesError.__name__,
        what=str(error),
        digest=UnequalBatchesError.__name__,
        occurrence=generation.pack(),
        user_error=True,
    )
