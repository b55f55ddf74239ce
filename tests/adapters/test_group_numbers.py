"""The ordinals of process groups, and the groups that a script makes late."""

from __future__ import annotations

from holdfast.frameworks.torch.comm.group_numbers import GroupKey, GroupNumbers

WORLD = GroupKey((), 0, "train.py:3")
SETUP = GroupKey((0, 1), 0, "train.py:5")
LATE = GroupKey((0, 1), 1, "train.py:31")


def opened(*present: GroupKey) -> GroupNumbers:
    """Return the numbers of a process whose session is open."""
    numbers = GroupNumbers()
    for key in present:
        assert numbers.number(key.ranks, key.place) == key.ordinal
    numbers.session_opens(present)
    return numbers


def digests(numbers: GroupNumbers, *present: GroupKey) -> list[tuple[tuple[int, ...], str]]:
    """Return the digest of each set of ranks with changes."""
    return [(change.ranks, change.digest) for change in numbers.changes(present)]


def test_groups_of_the_setup_are_no_change() -> None:
    assert opened(WORLD, SETUP).changes([SETUP, WORLD]) == []


def test_without_a_session_there_is_no_change() -> None:
    assert GroupNumbers().changes([WORLD, LATE]) == []


def test_a_late_group_and_a_destroyed_one_are_changes() -> None:
    numbers = opened(WORLD, SETUP)
    made, gone = digests(numbers, WORLD, SETUP, LATE), digests(numbers, WORLD)
    assert [ranks for ranks, _ in (*made, *gone)] == [(0, 1), (0, 1)] and made != gone
    assert numbers.changes([WORLD, SETUP, LATE])[0].places == ["train.py:31"]
    assert numbers.changes([WORLD])[0].places == []


def test_a_late_group_has_the_line_that_made_it_in_its_digest() -> None:
    """Otherwise two groups of the same ranks, made in different places, would be connected with each other."""
    numbers = opened(WORLD, SETUP)
    elsewhere = LATE._replace(place="train.py:40")
    assert digests(numbers, WORLD, SETUP, LATE) != digests(numbers, WORLD, SETUP, elsewhere)


def test_ranks_may_make_a_group_of_the_setup_in_different_lines() -> None:
    other = SETUP._replace(place="train.py:7")
    assert digests(opened(WORLD, SETUP), WORLD, SETUP, LATE) == digests(
        opened(WORLD, other), WORLD, other, LATE
    )


def test_other_ranks_have_another_digest() -> None:
    here, there = opened(WORLD), opened(WORLD)
    one, other = GroupKey((0, 1), 0, "a.py:1"), GroupKey((0, 2), 0, "a.py:1")
    assert here.changes([WORLD, one])[0].digest != there.changes([WORLD, other])[0].digest


def test_a_generation_counts_on_from_the_groups_that_are_left() -> None:
    """A replacement has not made the destroyed groups."""
    survivor, replacement = opened(WORLD, SETUP), opened(WORLD, SETUP)
    assert [survivor.number((0, 1), "train.py:31") for _ in range(3)] == [1, 2, 3]
    assert survivor.number((2, 3), "train.py:31") == 0
    for numbers in (survivor, replacement):
        numbers.restart([WORLD, SETUP])
        assert [numbers.number(ranks, "") for ranks in ((0, 1), (2, 3), ())] == [1, 0, 1]


def test_a_group_that_was_made_once_counts_after_its_end() -> None:
    """A replacement would make it alone. Groups that are made again and again are made by all ranks together."""
    numbers = opened(WORLD)
    numbers.number((0, 1), "library.py:8")
    assert [change.places for change in numbers.changes([WORLD])] == [["library.py:8"]]
    numbers.number((0, 1), "library.py:8")
    assert numbers.changes([WORLD]) == []
