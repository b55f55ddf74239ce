"""Who writes what: a deterministic plan that every rank computes alone from the catalogue.

Theory. A box is written by one of its living holders. Boxes with the fewest holders leave no choice and come
first, then the largest, then by name: the classic greedy for balanced loads. A large box is cut along its first
dimension longer than 1, so that every part is one contiguous byte range of the holder's box, and its parts fill
the least loaded holders up to one common level. With all ranks as ``sources`` this is the plan of a periodic
checkpoint, with the living ones it is the plan of a last-gasp checkpoint: nothing else changes.

Invariants:
1. The plan is a pure function of (catalogue, sources, copies): integers only, ties broken by name and rank.
2. Every box that has a living holder is covered by exactly ``min(copies, holders)`` disjoint writers' parts.
3. No writer gets the same element of a box twice, and every part lies inside one box that its writer holds.
4. ``uncovered`` names every region of a tensor that no living rank holds; a plan with one must not be written.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import msgspec
import numpy as np
from numpy.typing import NDArray

from holdfast.errors import StateError
from holdfast.store.layout import DTYPE_SIZE_BYTES, Box, Catalogue, TensorEntry, subtract

PART_SIZE_BYTES_MIN = 1024 * 1024
"""A box is only cut into parts of at least about this size: each part costs a header entry and a read."""

Ranks = NDArray[np.int64]


class WriteItem(msgspec.Struct, frozen=True, order=True):
    """Write ``part`` of tensor ``fqn``; the writer holds it inside its ``box`` (both in global coordinates)."""

    fqn: str
    box: Box
    part: Box

    def byte_range(self, item_size_bytes: int) -> tuple[int, int]:
        """Where the part lies in the bytes of the box."""
        before, per_row = 0, item_size_bytes
        for d in reversed(range(len(self.box.sizes))):
            before += (self.part.offsets[d] - self.box.offsets[d]) * per_row
            per_row *= self.box.sizes[d]
        return before, before + self.part.numel * item_size_bytes


class Plan(msgspec.Struct, frozen=True):
    """The shares of all sources. ``uncovered`` and ``absent`` are empty when a complete checkpoint can be written."""

    sources: tuple[int, ...]
    copies: int
    shares: dict[int, tuple[WriteItem, ...]]
    uncovered: tuple[tuple[str, Box], ...]
    absent: tuple[int, ...]

    def items(self, rank: int) -> tuple[WriteItem, ...]:
        """What ``rank`` writes, sorted by name and region."""
        return self.shares.get(rank, ())

    @property
    def complete(self) -> bool:
        """True when every element of every tensor has a living holder."""
        return not self.uncovered and not self.absent

    def why_incomplete(self) -> str:
        """One line that names what is missing, or an empty string."""
        reasons = [f"rank(s) {_some(self.absent)} declared no layout"] if self.absent else []
        if self.uncovered:
            reasons.append(f"no living holder of {_some([f'{fqn}{box}' for fqn, box in self.uncovered])}")
        return "; ".join(reasons)


def plan(catalogue: Catalogue, sources: frozenset[int], copies: int = 1) -> Plan:
    """Compute who writes what.

    Args:
        catalogue: what exists and who holds it, the dead included.
        sources: ranks that can write (living and sound).
        copies: how many different writers each box gets, as far as it has holders.

    Raises:
        StateError: a source is not in the catalogue, or ``copies`` < 1.
    """
    if copies < 1:
        raise StateError(f"copies={copies}: at least one copy of each box must be written")
    if not sources <= catalogue.ranks:
        raise StateError(f"rank(s) {_some(sorted(sources - catalogue.ranks))} declared no layout")
    living = [np.array([r for r in ranks if r in sources], dtype=np.int64) for ranks in catalogue.classes]
    groups: dict[tuple[int, ...], Ranks] = {}
    work: list[tuple[int, int, str, Box]] = []
    holders: dict[tuple[str, Box], Ranks] = {}
    uncovered: list[tuple[str, Box]] = []
    for tensor in catalogue.tensors:
        alive: list[Box] = []
        item = DTYPE_SIZE_BYTES[tensor.dtype]
        for entry in tensor.boxes:
            if entry.classes not in groups:
                groups[entry.classes] = np.sort(np.concatenate([living[c] for c in entry.classes]))
            group = groups[entry.classes]
            if len(group):
                alive.append(entry.box)
                holders[tensor.fqn, entry.box] = group
                work.append((len(group), -entry.box.numel * item, tensor.fqn, entry.box))
            elif tensor.size_bytes == 0 and sources:
                holders[tensor.fqn, entry.box] = np.array([min(sources)], dtype=np.int64)
                work.append((1, 0, tensor.fqn, entry.box))
                alive.append(entry.box)
        uncovered += _uncovered(tensor, alive)
    shares = _assign(sorted(work), holders, catalogue.world, copies)
    return Plan(tuple(sorted(sources)), copies, shares, tuple(uncovered), catalogue.absent)


def _assign(
    work: Sequence[tuple[int, int, str, Box]],
    holders: dict[tuple[str, Box], Ranks],
    world: int,
    copies: int,
) -> dict[int, tuple[WriteItem, ...]]:
    """Deal the boxes out, hardest first."""
    loads = np.zeros(world, dtype=np.int64)
    shares: dict[int, list[WriteItem]] = {}
    for count, negative_size, fqn, box in work:
        group = holders[fqn, box]
        if count == 1:
            rank = int(group[0])
            loads[rank] -= negative_size
            shares.setdefault(rank, []).append(WriteItem(fqn, box, box))
            continue
        wanted = min(copies, count)
        parts, ring = _parts(box, -negative_size, group, loads, wanted)
        for index, (part, size_bytes) in enumerate(parts):
            for copy in range(wanted):
                rank = int(ring[(index + copy) % len(ring)])
                loads[rank] += size_bytes
                shares.setdefault(rank, []).append(WriteItem(fqn, box, part))
    return {rank: tuple(sorted(items)) for rank, items in shares.items()}


def _parts(
    box: Box, size_bytes: int, group: Ranks, loads: Ranks, wanted: int
) -> tuple[list[tuple[Box, int]], Ranks]:
    """Cut a box for its holders: the parts with their sizes, and the holders to deal them to in turn."""
    pieces_max = min(len(group), size_bytes // PART_SIZE_BYTES_MIN)
    if pieces_max <= 1 and wanted == 1:
        least = int(np.argmin(loads[group]))
        return [(box, size_bytes)], group[least : least + 1]
    order = group[np.argsort(loads[group], kind="stable")]
    if pieces_max <= 1:
        return [(box, size_bytes)], order[:wanted]
    level = loads[order[:pieces_max]]
    # The common level when the first k holders share the box; a holder above it, or just below, takes no part.
    common = (size_bytes + np.cumsum(level)) // np.arange(1, pieces_max + 1)
    useful = np.nonzero(common - level >= PART_SIZE_BYTES_MIN // 2)[0]
    pieces = int(useful[-1]) + 1 if len(useful) else 1
    cuts = np.cumsum(common[pieces - 1] - level[:pieces])
    axis = next(d for d, size in enumerate(box.sizes) if size > 1)
    rows = box.sizes[axis]
    per_row = size_bytes // rows
    edges = [0, *(min(rows, (2 * int(cut) + per_row) // (2 * per_row)) for cut in cuts[:-1]), rows]
    parts = [(_slab(box, axis, a, b), (b - a) * per_row) for a, b in pairwise(edges) if b > a]
    return parts, order[: max(len(parts), wanted)]


def _slab(box: Box, axis: int, start: int, stop: int) -> Box:
    offsets, sizes = list(box.offsets), list(box.sizes)
    offsets[axis] += start
    sizes[axis] = stop - start
    return Box(tuple(offsets), tuple(sizes))


def _uncovered(tensor: TensorEntry, alive: Sequence[Box]) -> list[tuple[str, Box]]:
    """Declared boxes that nobody alive covers, then regions that nobody ever declared."""
    rest = missing(tensor.shape, alive)
    if not rest:
        return []
    known = set(alive)
    lost = [e.box for e in tensor.boxes if e.box not in known and any(e.box.intersect(r) for r in rest)]
    undeclared = [piece for region in rest for piece in subtract(region, lost)]
    return [(tensor.fqn, box) for box in (*lost, *undeclared)]


def missing(shape: Sequence[int], boxes: Sequence[Box]) -> list[Box]:
    """The regions of a tensor of ``shape`` that no box covers; empty when it is covered completely."""
    whole = Box.whole(shape)
    if not boxes:
        return [whole]
    if whole in boxes or _is_grid(shape, boxes):
        return []
    return subtract(whole, boxes)


def _is_grid(shape: Sequence[int], boxes: Sequence[Box]) -> bool:
    """True when the boxes are exactly the cells of a regular cut of every dimension (any device mesh): linear time."""
    cells = 1
    for d, length in enumerate(shape):
        intervals = sorted({(box.offsets[d], box.sizes[d]) for box in boxes})
        end = 0
        for offset, size in intervals:
            if offset != end:
                return False
            end = offset + size
        if end != length:
            return False
        cells *= len(intervals)
    return cells == len(set(boxes))


def _some(names: Sequence[object], limit: int = 4) -> str:
    """The first few of a list, for a message."""
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(str(name) for name in names[:limit]) + more
