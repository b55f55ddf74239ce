"""Collectives between two steps that only one of two ranks makes, although both run the same script.

Theory. Between two blocks all ranks make the same number of collectives. If the code there depends on variables that a
replacement does not have, the replacement makes more collectives than the other ranks, or fewer. The job then breaks or
hangs, and the next replacement does the same again. The death or hang shows nothing of that cause, but the counts of
the ranks prove it: one rank has begun the next block, so its count is final, and another rank has a higher count. The
count of a rank that waits for an agreement of all ranks (at the end of an epoch) is final in the same way.

Invariants:
1. Counts are compared only within one generation and one step. A rank counts only from its first committed step in a
   generation on. So an interrupted step, or code that a recovery runs again, is never evidence.
2. Ranks whose processes have started together are not compared: their variables do not differ.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from holdfast.core.decide.stop_policy import UNMATCHED, Failure
from holdfast.core.ids import Generation, MemberId
from holdfast.core.protocol.messages import OutsideCollectives, RankState, made_in
from holdfast.errors import UnmatchedCollectiveError

IN_BLOCK: frozenset[RankState] = frozenset({"compute", "voting", "aborted", "in_doubt", "updating", "torn"})
"""States of a rank that has begun the block of its step."""

HINT = (
    "keep what decides about a collective after a block in session(state={{...}}) (a dict that the code changes after "
    "`if step.committed:`), or compute it from step.number{names}"
)


class RankSeen(NamedTuple):
    """The state of one rank after a fault. ``begun``: its count is final, as it has begun the block of ``step``."""

    rank: int
    member_id: MemberId
    begun: bool
    step: int
    outside: OutsideCollectives | None

    @property
    def born(self) -> int:
        """A number that is equal for ranks whose processes have started together, and greater for later starts.

        The members of one start have ids in the order of their ranks.
        """
        return self.member_id - self.rank


class _Count(NamedTuple):
    made: int
    seen: RankSeen


def unmatched(generation: Generation, ranks: Iterable[RankSeen]) -> Failure | None:
    """Return the proof that a replacement and another rank make different numbers of collectives between two steps.

    The result is None if there is no proof.

    Args:
        generation: the generation in which the ranks have run until the fault.
        ranks: the state of each rank.
    """
    counts = [_Count(made_in(generation, seen.step, seen.outside), seen) for seen in ranks]
    final = [count for count in counts if count.seen.begun]
    for least in _least(final):
        for other in counts:
            seen = other.seen
            if seen.step == least.seen.step and seen.born != least.seen.born and other.made > least.made:
                return _failure(generation, other.seen, least.seen, least.made)
    return None


def _least(final: list[_Count]) -> list[_Count]:
    """Return the entry with the smallest count, and one of a rank that started at another time.

    The second entry has the smallest count among the ranks that started at another time than the rank of the first
    entry. It is missing if all ranks started together.
    """
    if not final:
        return []
    first = min(final, key=lambda count: count.made)
    others = [count for count in final if count.seen.born != first.seen.born]
    return [first, *([min(others, key=lambda count: count.made)] if others else [])]


def _failure(generation: Generation, makes: RankSeen, leaves_out: RankSeen, both: int) -> Failure:
    """Return the failure of that rank whose process was started later.

    ``makes`` is the rank that has made more collectives than ``leaves_out``. ``both`` is the number of collectives
    that both ranks have made.
    """
    assert makes.outside is not None
    newcomer = max(makes, leaves_out, key=lambda seen: seen.born)
    extra = makes.outside.first[min(both, len(makes.outside.first) - 1)]
    names = extra.variables
    does, other = ("makes", leaves_out) if newcomer is makes else ("leaves out", makes)
    because = f"; the script decides by {', '.join(names)}, which a replacement begins again" if names else ""
    error = UnmatchedCollectiveError(
        f"between the blocks of steps {makes.step - 1} and {makes.step}, rank {newcomer.rank} {does} {extra.what}, "
        f"unlike rank {other.rank}: its process has replaced another one{because}",
        hint=HINT.format(names=f": {', '.join(names)}" if names else ""),
    )
    return Failure(
        rank=newcomer.rank,
        step=makes.step,
        kind=UNMATCHED,
        what=str(error),
        digest=UNMATCHED,
        occurrence=generation.pack(),
    )
