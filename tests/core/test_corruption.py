"""The rank that holds the wrong copy, if the digests can show it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.core.protocol.health_messages import CopyDigest, ranks_of, ranks_text
from holdfast.core.watch.corruption import suspects


def told(groups: dict[tuple[int, ...], dict[int, int]]) -> dict[int, tuple[CopyDigest, ...]]:
    """Return digests of the one place ``w`` per rank. The argument has, by group of holders: rank -> digest."""
    found: dict[int, tuple[CopyDigest, ...]] = {}
    for holders, digests in groups.items():
        for rank, digest in digests.items():
            found[rank] = (*found.get(rank, ()), CopyDigest(ranks_text(holders), "w", digest))
    return found


@pytest.mark.parametrize(
    ("groups", "ranks", "certain"),
    [
        ({(0, 1, 2, 3): {0: 5, 1: 5, 2: 6, 3: 5}}, (2,), True),
        ({(0, 1, 2): {0: 6, 1: 5, 2: 5}}, (0,), True),
        ({(0, 1): {0: 5, 1: 6}}, (0, 1), False),
        ({(0, 1, 2, 3): {0: 5, 1: 5, 2: 6, 3: 6}}, (0, 1, 2, 3), False),
        ({(0, 2): {0: 5, 2: 6}, (1, 3): {1: 7, 3: 7}}, (0, 2), False),  # HSDP: two holders of each shard
        ({(0, 1, 2, 3): {0: 1, 1: 1, 2: 1, 3: 9}, (1, 3): {1: 5, 3: 6}}, (3,), True),
        ({(0, 1, 2, 3, 4): {0: 5, 1: 5, 2: 5, 3: 6, 4: 7}}, (3, 4), True),
        ({(0, 1, 2, 3): {0: 5, 1: 6}}, (0, 1), False),  # two ranks have not reported: no majority of four
        ({(0, 1): {0: 5, 1: 5}}, (), False),
    ],
)
def test_the_odd_one_out(
    groups: dict[tuple[int, ...], dict[int, int]], ranks: tuple[int, ...], certain: bool
) -> None:
    holders = {rank for group in groups for rank in group}
    found = suspects(told(groups), holders)
    assert (found.ranks, found.certain) == (ranks, certain)
    assert bool(found.places) == bool(ranks)


def test_the_evidence_names_the_place() -> None:
    found = suspects(told({(0, 1, 2, 3): {0: 5, 1: 5, 2: 6, 3: 5}}), range(4))
    assert found.places == ("w: rank 2 against 3 of 4 ranks that hold it",)


def test_the_dead_have_no_vote() -> None:
    digests = told({(0, 1, 2, 3): {0: 5, 1: 6, 3: 5}})
    assert suspects(digests, (0, 1, 3)).ranks == (1,) and suspects(digests, (0, 1, 3)).certain
    no_majority = suspects(digests, range(6))
    assert no_majority.ranks == (0, 1, 3) and not no_majority.certain


@given(st.lists(st.integers(0, 40), min_size=1, unique=True).map(sorted))
def test_ranks_as_text(ranks: list[int]) -> None:
    assert list(ranks_of(ranks_text(ranks))) == ranks


def test_a_grid_of_ranks_is_short() -> None:
    assert ranks_text(range(0, 4096, 8)) == "0-4088/8" and len(ranks_of("0-4088/8")) == 512
