"""The steps that the memory tier can restore, given the states that each rank has in shared memory.

Theory. Every rank keeps its newest states in shared memory. All ranks keep the states of the same steps. A lost rank
that kept the decided step is replaced as if a peer had held its boxes. Otherwise all ranks go back to the newest step
of which every rank has a state, and run the later steps again. The repeated steps give the same bits, so only time is
lost.

A rank may also have left a log of the updates since its newest state. Then its boxes can be computed for each step that
the log reaches. The other boxes come from the living ranks, which stay at their step.

Invariants:
1. A state of step s restores its rank at step s and at no other step: steps are never mixed.
2. No rank goes back to a step before one that is sealed on disk: that checkpoint would cost fewer steps.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from holdfast.core.decide.decision import Decision
from holdfast.core.job.membership import Member
from holdfast.core.protocol.messages import Settled

NONE = -1

Elsewhere = Mapping[int, frozenset[int]]
"""States that nodes keep in memory for ranks of other nodes: the steps by rank."""


def kept_by(
    members: Sequence[Member], answers: Mapping[int, Settled], elsewhere: Elsewhere
) -> dict[int, frozenset[int]]:
    """Return, for each rank, the steps of its states in memory.

    A living rank lists its steps in the answer to the fence. For a dead rank its agent has listed them. Other nodes may
    keep further states of the rank.
    """
    return {
        m.rank: frozenset(
            answers[m.rank].kept
            if m.alive and m.rank in answers
            else m.exited.kept
            if m.exited is not None
            else ()
        )
        | elsewhere.get(m.rank, frozenset())
        for m in members
    }


def replayed(
    decided: Decision, members: Sequence[Member], answers: Mapping[int, Settled], elsewhere: Elsewhere
) -> bool:
    """Return True if lost ranks can be replaced at the decided step, and at least one only with its gradient log.

    A lost rank can be replaced if it has left a kept state of that step, or a gradient log that leads to the step.
    """
    if decided.step is None or not decided.sources:
        return False
    kept = kept_by(members, answers, elsewhere)
    logged = {
        m.rank: m.exited is not None and decided.step in m.exited.replays
        for m in members
        if not m.alive and decided.step not in kept[m.rank]
    }
    return bool(logged) and all(logged.values())


def newest_complete(kept: Mapping[int, Collection[int]], limit: int) -> int:
    """Return the newest step, at most ``limit``, of which every rank has a state; ``NONE`` if there is no such step."""
    common = frozenset.intersection(*map(frozenset, kept.values())) if kept else frozenset()
    return max((step for step in common if step <= limit), default=NONE)


def replacement_step(
    decided: Decision,
    members: Sequence[Member],
    answers: Mapping[int, Settled],
    elsewhere: Elsewhere,
    sealed_step: int,
) -> int:
    """Return the step at which lost ranks can be replaced from memory; ``NONE`` if there is no such step.

    The living ranks keep their processes, and go back to this step if it is before the decided step.
    """
    if decided.step is None:
        return NONE
    kept = kept_by(members, answers, elsewhere)
    if all(decided.step in kept[m.rank] for m in members if not m.alive):
        return decided.step
    back = newest_complete(kept, decided.step)
    floors = [answers[m.rank].rewind if m.rank in answers else NONE for m in members if m.alive]
    if back < sealed_step or not floors or not 0 <= min(floors) or max(floors) > back:
        return NONE
    return back
