"""A sum over all ranks that detects vectors of different lengths before gloo does.

Theory. Ranks of a script that do different things may meet in different agreements, with vectors of different lengths.
gloo then ends the process. So each sum begins with a head of a fixed length, which also carries the length of the
vector and its square. By Cauchy-Schwarz these two sums show whether all lengths are equal. A vote has room in the head,
so it still takes one sum.
"""

from __future__ import annotations

from collections.abc import Callable

from holdfast.core.worker.vote import VECTOR_LENGTH, all_equal
from holdfast.errors import PeerLost


def sum_of_equal_lengths(vector: list[int], add: Callable[[list[int]], list[int]]) -> list[int]:
    """Return the sum of ``vector`` over all ranks.

    Args:
        vector: int64 numbers of this rank.
        add: returns the sum of a list over all ranks; all ranks call it with lists of one length.

    Raises:
        PeerLost: the vectors of the ranks have different lengths.
    """
    length, first = len(vector), vector[:VECTOR_LENGTH]
    count, total, squares, *sums = add(
        [1, length, length * length, *first, *([0] * (VECTOR_LENGTH - len(first)))]
    )
    if not all_equal(count, total, squares):
        raise PeerLost(f"the ranks are in different agreements: {length} words on this rank")
    rest = vector[VECTOR_LENGTH:]
    return [*sums[:length], *(add(rest) if rest else ())]
