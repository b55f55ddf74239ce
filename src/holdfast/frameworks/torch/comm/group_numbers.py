"""The numbers that tell process groups of the same ranks apart, and the groups that the script makes late.

Theory. The members of a group connect under its name: their global ranks, and an ordinal. Each rank counts alone, so
the ordinals agree only if all members make the same groups. A replacement runs the script from its top, and makes the
groups that the script makes before its session. It may lack a group that the script makes later (``if group is None``
after a block), or hold one that the others have destroyed. Members of such a group would wait for each other in vain.
So before groups are rebuilt, each rank publishes its *changes*: the groups of those ranks whose groups have changed
after the session was opened. Most scripts have no changes, and then nothing is published.

A group that was made late is also known by the line of code that made it: two groups of the same ranks may have been
made in different places.

A library may make a group once in each process, and destroy it at once (ignite's first metric). A replacement would
make it alone. So a group that was made late, only once at its line, also counts after its end. A group that is made
again and again does not: all ranks make the next one together.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

import xxhash

Ranks = tuple[int, ...]


class GroupKey(NamedTuple):
    """The identity of a group in one process.

    Attributes:
        ranks: global ranks of the members; empty for the default group.
        ordinal: number of the group among those of the same ranks.
        place: line of code that made the group, as ``train.py:31``.
    """

    ranks: Ranks
    ordinal: int
    place: str


class GroupChange(NamedTuple):
    """The groups of ``ranks`` in a process that are others than at the opening of its session.

    Attributes:
        digest: a digest of the present groups of these ranks.
        places: lines of code that made the groups that were made late.
    """

    ranks: Ranks
    digest: str
    places: Sequence[str]


class GroupNumbers:
    """The counts of the groups of this process, and the groups at the opening of its session."""

    def __init__(self) -> None:
        self._made: Counter[Ranks] = Counter()
        # Groups made after the opening, by the line that made them.
        self._late: Counter[tuple[Ranks, str]] = Counter()
        self._opened: frozenset[GroupKey] | None = None  # None: no session was opened

    def number(self, ranks: Ranks, place: str) -> int:
        """Return the ordinal of the group of ``ranks`` that is made now, at the line ``place``."""
        if ranks and self._opened is not None:
            self._late[ranks, place] += 1
        self._made[ranks] += 1
        return self._made[ranks] - 1

    def session_opens(self, present: Iterable[GroupKey]) -> None:
        """Record the ``present`` groups: the script makes them in each process."""
        self._opened = frozenset(present)

    def restart(self, present: Iterable[GroupKey]) -> None:
        """Count further groups from the ``present`` ones on, because a generation begins.

        A replacement has not made the groups that the other ranks have destroyed. The key space of the generation is
        new, so a name may occur again.
        """
        last: dict[Ranks, int] = {}
        for key in present:
            last[key.ranks] = max(last.get(key.ranks, -1), key.ordinal)
        self._made = Counter(
            {ranks: last.get(ranks, -1) + 1 if ranks else count for ranks, count in self._made.items()}
        )

    def changes(self, present: Iterable[GroupKey]) -> list[GroupChange]:
        """Return a change for each set of ranks whose groups are others than at the opening of the session."""
        opened = self._opened
        if opened is None:
            return []
        now = frozenset(present)
        once = [late for late, count in self._late.items() if count == 1]
        changed = {key.ranks for key in now ^ opened if key.ranks} | {ranks for ranks, _ in once}
        return [
            _change(
                ranks,
                [key for key in now if key.ranks == ranks],
                opened,
                [place for others, place in once if others == ranks],
            )
            for ranks in sorted(changed)
        ]


def _change(
    ranks: Ranks, held: Iterable[GroupKey], opened: Collection[GroupKey], once: Sequence[str]
) -> GroupChange:
    """Return the change of the groups of ``ranks``, now ``held``. ``once``: lines that have made one late group.

    The place counts only for a group that was made late: before the session, ranks may make a group in different lines.
    """
    known = sorted((key.ordinal, "" if key in opened else key.place) for key in held)
    digest = xxhash.xxh3_64_hexdigest(repr((ranks, known, sorted(once))).encode())
    return GroupChange(ranks, digest, sorted({place for _, place in known if place} | set(once)))
