"""The comparison of copies: the parts of the state that several ranks hold, and the vote that compares each part.

Theory. Ranks that hold the same boxes form a *group*: their boxes are copies of each other. All boxes of a group, one
after the other, are one *stream* of bytes, equal on every member. One comparison is called a *turn* here. A turn
compares one slice of every stream, and ``turns`` turns compare every stream completely. The slice follows from the
catalogue and the turn's number, so all holders take digests of the same bytes without communication. One number
(``plan``) shows whether two ranks have the same catalogue. A rank has a *factor* in each of its groups. It multiplies
the digest of each group by this factor, and adds up the products. The factors of a group's members add up to zero, so
equal copies cancel out of the sum over all ranks.

Invariants:
1. In a turn all holders of a box digest the same bytes of the box, whatever other boxes each of them holds.
2. Within ``turns`` consecutive turns every byte of every group is compared once.
3. The factors of a group add up to zero.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from holdfast.store.layouts.box import Extent
from holdfast.store.layouts.layout import DTYPE_SIZE_BYTES, Catalogue

PLAN_MODULUS = 1 << 20
ALIGNMENT_BYTES = 64
NAMED_MAX = 32


class ReplicaGroup(NamedTuple):
    """The boxes that exactly the ranks ``holders`` hold. ``extents`` are these boxes as byte ranges."""

    holders: tuple[int, ...]
    factor: int  # the factor of this rank
    extents: tuple[Extent, ...]
    size_bytes: int

    def cut(self, start: int, stop: int) -> list[Extent]:
        """Return the bytes ``start`` to ``stop`` of the group's stream (its boxes in order) as byte ranges of boxes."""
        found, at = [], 0
        for extent in self.extents:
            size = extent.size_bytes
            low, high = max(start - at, 0), min(stop - at, size)
            if low < high:
                found.append(Extent(extent.fqn, extent.box, low, high))
            at += size
            if at >= stop:
                break
        return found


class ReplicaCopies:
    """The parts of the state that one rank compares with other ranks.

    Args:
        catalogue: the catalogue of all ranks.
        rank: the rank of this process.
        compared: function of a tensor name; True if all copies of this tensor must be equal after every step.
        turns: the number of comparisons in which every byte is compared once.

    Attributes:
        plan: a number that shows whether two ranks have the same catalogue.
        groups: the groups of this rank.
        complete: this rank holds a part of every tensor. If all ranks do, each can be given the plain values of any
            other rank.
    """

    def __init__(self, catalogue: Catalogue, rank: int, compared: Callable[[str], bool], turns: int) -> None:
        self.plan = int(catalogue.digest[:8], 16) % (PLAN_MODULUS - 1) + 1
        self.groups = _groups(catalogue, rank, compared)
        held = {tensor.fqn for tensor, _, _ in catalogue.held_by(rank)}
        self.complete = len(held) == len(catalogue.tensors)
        self._turns: list[list[tuple[ReplicaGroup, list[Extent]]]] = [[] for _ in range(turns)]
        for group in self.groups:
            step = _aligned(-(-group.size_bytes // turns))
            for turn, found in enumerate(self._turns):
                extents = group.cut(turn * step, (turn + 1) * step)
                if extents:
                    found.append((group, extents))

    def turn(self, number: int) -> list[tuple[ReplicaGroup, list[Extent]]]:
        """Return the byte ranges to compare in comparison ``number`` (any integer >= 0), by group of holders."""
        return self._turns[number % len(self._turns)]

    def whole(self) -> list[tuple[ReplicaGroup, list[Extent]]]:
        """Return each group of ranks that hold the same boxes, with the byte ranges of all these boxes."""
        return [(group, list(group.extents)) for group in self.groups]


def _groups(catalogue: Catalogue, rank: int, compared: Callable[[str], bool]) -> tuple[ReplicaGroup, ...]:
    found: dict[tuple[int, ...], list[Extent]] = {}
    for tensor, box, holders in catalogue.held_by(rank):
        size = box.numel * DTYPE_SIZE_BYTES[tensor.dtype]
        if size and len(holders) > 1 and compared(tensor.fqn):
            found.setdefault(holders, []).append(Extent(tensor.fqn, box, 0, size))
    groups = []
    for holders, extents in sorted(found.items()):
        factor = 1 if holders[0] != rank else 1 - len(holders)
        groups.append(ReplicaGroup(holders, factor, tuple(extents), sum(e.stop for e in extents)))
    return tuple(groups)


def runs(extents: Sequence[Extent]) -> list[tuple[str, list[Extent]]]:
    """Divide extents into at most ``NAMED_MAX`` lists of about equal length, each with a name for the user."""
    size = max(1, -(-len(extents) // NAMED_MAX))
    parts = [list(extents[at : at + size]) for at in range(0, len(extents), size)]
    return [
        (str(part[0]) if len(part) == 1 else f"{part[0]} to {part[-1]} ({len(part)} parts)", part)
        for part in parts
    ]


def _aligned(size_bytes: int) -> int:
    return -(-size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
