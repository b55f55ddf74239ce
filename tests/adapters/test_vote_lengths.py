"""Sums of vectors whose lengths may differ between ranks."""

from __future__ import annotations

import pytest

from holdfast.core.worker.vote import VECTOR_LENGTH
from holdfast.errors import PeerLost
from holdfast.frameworks.torch.comm.vote_lengths import sum_of_equal_lengths


def sums(*vectors: list[int]) -> list[int]:
    """Return the sum that the first rank gets, if each rank sums one of ``vectors``."""
    sent: list[list[list[int]]] = []
    for vector in vectors:
        calls: list[list[int]] = []

        def record(part: list[int], calls: list[list[int]] = calls, count: int = len(vectors)) -> list[int]:
            calls.append(part)
            return [count * number for number in part]  # as if all ranks had this vector

        sum_of_equal_lengths(vector, record)
        sent.append(calls)
    turns = iter(range(len(sent[0])))

    def add(part: list[int]) -> list[int]:
        turn = next(turns)
        assert part == sent[0][turn]
        parts = [calls[turn] for calls in sent]
        assert len({len(each) for each in parts}) == 1, "gloo ends the process"
        return [sum(numbers) for numbers in zip(*parts, strict=True)]

    return sum_of_equal_lengths(vectors[0], add)


@pytest.mark.parametrize("length", [0, 1, 4, VECTOR_LENGTH, VECTOR_LENGTH + 1, 500])
def test_vectors_of_one_length_are_added(length: int) -> None:
    first, second = list(range(length)), [-7] * length
    assert sums(first, second) == [number - 7 for number in first]


@pytest.mark.parametrize("other", [1, VECTOR_LENGTH, 500])
def test_vectors_of_different_lengths_are_not_added(other: int) -> None:
    with pytest.raises(PeerLost, match="in different agreements: 4 words on this rank"):
        sums([1] * 4, [1] * other)
