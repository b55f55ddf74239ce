"""Which ranks draw the same random numbers."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch

from holdfast.frameworks.common.random_streams import Streams, compare_generators
from holdfast.frameworks.torch.state.rng import Draws, generator_digests, seed_each


class Votes:
    """Sums of vectors over threads that stand for ranks."""

    def __init__(self, ranks: int) -> None:
        self._said: list[list[int]] = [[]] * ranks
        self._barrier = threading.Barrier(ranks, timeout=20)

    def of(self, rank: int) -> Callable[[list[int]], list[int]]:
        def vote(vector: list[int]) -> list[int]:
            self._said[rank] = vector
            self._barrier.wait()
            total = [sum(column) for column in zip(*self._said, strict=True)]
            self._barrier.wait()
            return total

        return vote


def compared(states: Sequence[int], *, known: Sequence[bool] = ()) -> Streams:
    """Return what all ranks find, when their generators have the given states."""
    votes, found = Votes(len(states)), [Streams({})] * len(states)

    def compare(rank: int) -> None:
        found[rank] = compare_generators(
            {"torch": states[rank], "numpy": 7},
            rank,
            len(states),
            votes.of(rank),
            copies_known=bool(known) and known[rank],
        )

    threads = [threading.Thread(target=compare, args=(rank,)) for rank in range(len(states))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(each == found[0] for each in found)
    assert found[0].rules["numpy"] == "equal"
    return found[0]


@pytest.mark.parametrize(
    ("states", "known", "numbers"),
    [
        ([5, 5, 5, 5], [], [0, 0, 0, 0]),
        ([5, 5, 5, 5], [True] * 4, [0, 0, 0, 0]),
        ([5, 6, 7, 8], [], [0, 1, 2, 3]),
        ([5, 5, 8, 8], [], [0, 0, 2, 2]),  # two copies in two parts each, one seed per copy
        ([5, 8, 5, 8], [], [0, 1, 0, 1]),
        ([5, 5, 5, 8], [True] * 4, [0, 1, 2, 3]),  # wrappers define four copies
        ([5, 5, 5, 8], [True, True, False, True], [0, 0, 0, 3]),
    ],
)
def test_copies_draw_as_their_generators_would(
    states: Sequence[int], known: Sequence[bool], numbers: Sequence[int]
) -> None:
    streams = compared(states, known=known)
    assert [streams.number("torch", copy) for copy in range(len(states))] == numbers
    again = Streams.of_plain(streams.plain(), len(states))
    assert again is not None and [again.number("torch", copy) for copy in range(len(states))] == numbers


def test_streams_of_more_ranks_than_a_vote_has_words() -> None:
    largest = (1 << 62) - 1
    votes: list[int] = []

    def vote(vector: list[int]) -> list[int]:
        votes.append(len(vector))
        return [1 if votes == [1, 2] and at == 0 else value for at, value in enumerate(vector)]

    found = compare_generators({"torch": largest}, 0, 2500, vote, copies_known=False)
    assert votes == [1, 2, 1008, 1008, 484] and found.number("torch", 2499) == 1


@pytest.mark.parametrize(
    "value",
    [
        None,
        3,
        {"torch": "all"},
        {"torch": [0, 1]},
        {"torch": [0, 1, 3]},
        {"torch": [0, 1, "2"]},
        {"torch": 1},
    ],
)
def test_streams_of_another_job_are_not_taken(value: object) -> None:
    assert Streams.of_plain(value, 3) is None


def test_each_generator_has_a_digest_and_a_stream_of_its_own() -> None:
    named = [("noise", torch.Generator().manual_seed(1))]

    def digests() -> dict[str, int]:
        return generator_digests(named)

    def begin() -> dict[str, int]:
        seed_each(Draws.same(0), lambda _: 11)
        named[0][1].manual_seed(1)
        return digests()

    before = begin()
    assert before == begin() and set(before) == set(Draws._fields)
    changes: dict[str, Callable[[], object]] = {
        "torch": lambda: torch.rand(1),
        "numpy": np.random.rand,
        "python": random.random,
        "named": lambda: torch.rand(1, generator=named[0][1]),
    }
    for kind, draw in changes.items():
        begin()
        draw()
        after = digests()
        assert {name for name in after if after[name] != before[name]} == {kind}
    seed_each(Draws(1, 1, 2, 3, 4), lambda stream: 100 + stream)
    drawn = torch.rand(1).item(), np.random.rand(), random.random()
    torch.manual_seed(101)
    np.random.seed(102)
    random.seed(103)
    assert drawn == (torch.rand(1).item(), np.random.rand(), random.random())
