"""Detection of a rank that computes wrong gradients: several ranks compute the gradients of one batch.

Theory. A wrong gradient of one rank is added to all copies of the state. The copies stay equal, so a comparison of
copies cannot detect the error. Other ranks therefore run the block of each rank again without collectives, with the
same batch and random numbers, and digests of the gradients are compared. A *copy* is one data-parallel replica of the
model, which one rank holds as a whole. Copies are numbered. The batch of copy ``owner`` is computed by that copy
(offset 0) and by copy ``owner - 1`` (offset 1). If the results differ, copy ``owner - 2`` also computes the batch
(offset 2; with two copies this is the owner again). All results are combined in one sum over all ranks. Each element of
the sum is written by one rank.

Invariants:
1. All ranks read the same verdict, because it is a function of the sum.
2. A rank is named only if two ranks agree against one of its results.
3. If no two ranks agree, nothing is concluded: a block may depend on the rank that runs it, and kernels may add in any
   order.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

OFFSETS = 3
AT_FIRST = 2
"""Number of offsets that each check computes. The third offset is computed only where two results differ."""

_NOT_YET, _RAN, _UNABLE = 0, 1, 2
_WORDS = 3
_WRAP = 1 << 64

Outcome = Literal["agree", "ask", "wrong", "unlike", "unclear", "nothing"]


class Ran(NamedTuple):
    """The result of one run of a block: 64-bit digests of its batch and of its gradients."""

    batch: int
    gradients: int


class RecomputationVerdict(NamedTuple):
    """The verdict on the results of all ranks in one check.

    Attributes:
        outcome: ``agree``: all compared results are equal. ``ask``: two results differ, and a third one is missing.
            ``wrong``: ``ranks`` compute wrong gradients. ``unlike``: the runs of the blocks of ``ranks`` had different
            batches on different ranks. ``unclear``: the batches of ``ranks`` give different gradients, and no two ranks
            agree. ``nothing``: no results were compared.
        ranks: the ranks that the outcome is about, as numbers of copies.
    """

    outcome: Outcome
    ranks: tuple[int, ...] = ()


def executor(owner: int, offset: int, copies: int) -> int:
    """Return the number of the copy that computes the batch of copy ``owner`` at ``offset``."""
    return (owner - offset) % copies


def owner_of(copy: int, offset: int, copies: int) -> int:
    """Return the number of the copy whose batch ``copy`` computes at ``offset``."""
    return (copy + offset) % copies


def encode(copy: int, copies: int, ran: Mapping[int, Ran | None]) -> list[int]:
    """Return the results of one copy as a vector that is summed over all ranks; int64.

    Args:
        copy: the number of the copy.
        copies: the number of copies.
        ran: the results of this copy by offset; None where it could not compute one.

    Returns:
        ``copies * OFFSETS * 3`` words, zero except for those of this copy.
    """
    vector = [0] * (copies * OFFSETS * _WORDS)
    for offset, result in ran.items():
        at = (owner_of(copy, offset, copies) * OFFSETS + offset) * _WORDS
        if result is None:
            vector[at] = _UNABLE
        else:
            vector[at : at + _WORDS] = [_RAN, _signed(result.batch), _signed(result.gradients)]
    return vector


def read(sums: Sequence[int], copies: int) -> RecomputationVerdict:
    """Return the verdict on ``sums``, the sum of the encoded results of all ranks.

    Example:
        >>> one = [encode(copy, 2, {0: Ran(copy, 7), 1: Ran(1 - copy, 7)}) for copy in (0, 1)]
        >>> read([a + b for a, b in zip(*one)], 2).outcome
        'agree'
    """
    unlike: set[int] = set()
    wrong: set[int] = set()
    unclear: set[int] = set()
    waiting = compared = False
    for owner in range(copies):
        by_value: dict[int, set[int]] = defaultdict(set)
        batches: set[int] = set()
        third = _NOT_YET
        for offset in range(OFFSETS):
            at = (owner * OFFSETS + offset) * _WORDS
            state, batch, gradients = sums[at : at + _WORDS]
            third = state
            if state == _RAN:
                batches.add(batch)
                by_value[gradients].add(executor(owner, offset, copies))
        ranks = set().union(*by_value.values())
        compared = compared or len(ranks) > 1
        if len(batches) > 1:
            unlike.add(owner)
        elif len(by_value) > 1:
            if third == _NOT_YET:
                waiting = True
            agreed = [value for value, found in by_value.items() if len(found) > 1]
            if len(agreed) == 1:
                wrong |= set().union(*(found for value, found in by_value.items() if value != agreed[0]))
            else:
                unclear.add(owner)
    return _verdict(unlike, wrong, unclear, waiting=waiting, compared=compared)


def _verdict(
    unlike: set[int], wrong: set[int], unclear: set[int], *, waiting: bool, compared: bool
) -> RecomputationVerdict:
    if unlike:
        return RecomputationVerdict("unlike", tuple(sorted(unlike)))
    if waiting:
        return RecomputationVerdict("ask")
    if wrong:
        return RecomputationVerdict("wrong", tuple(sorted(wrong)))
    if unclear:
        return RecomputationVerdict("unclear", tuple(sorted(unclear)))
    return RecomputationVerdict("agree" if compared else "nothing")


def _signed(word: int) -> int:
    return (word + _WRAP // 2) % _WRAP - _WRAP // 2
