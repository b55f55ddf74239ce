"""What the memory tier can give back, given which states each rank has there.

Theory. Every rank keeps its newest states in shared memory, of the same steps as all others. A lost rank that kept
the decided step is replaced as if a peer had held its boxes. Otherwise all ranks go back to the newest step of which
every one of them has a state, and the steps after it are done again: they are the same bit for bit, so no result is
lost, only time.

Beside its states a rank may have left a log of the updates since. Then its boxes can be made again at each step that
the log reaches, and everything else comes from the living, who stay where they are.

Invariants:
1. A state of step s stands for its rank at step s and nothing else: steps are never mixed.
2. Nobody goes back below a step that is sealed on disk: that checkpoint would cost less.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from holdfast.core.decide.decision import Decision
from holdfast.core.job.membership import Member
from holdfast.core.protocol.messages import Settled

NONE = -1

Elsewhere = Mapping[int, frozenset[int]]
"""Steps by rank of states that other nodes have."""


def kept_by(
    members: Sequence[Member], answers: Mapping[int, Settled], elsewhere: Elsewhere
) -> dict[int, frozenset[int]]:
    """Steps that each rank has a state of: as it answered to the fence, as its agent found it after its death, or as
    another node has it."""
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
    """Each lost rank has left the decided step, or a log of updates that leads to it; some only the latter."""
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
    """The newest step, at most ``limit``, of which every rank has a state; ``NONE`` when there is none."""
    common = frozenset.intersection(*map(frozenset, kept.values())) if kept else frozenset()
    return max((step for step in common if step <= limit), default=NONE)


def replacement_step(
    decided: Decision,
    members: Sequence[Member],
    answers: Mapping[int, Settled],
    elsewhere: Elsewhere,
    sealed_step: int,
) -> int:
    """The step at which the lost ranks can be replaced from memory, beside the living; ``NONE``: they cannot."""
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
