"""The plan of a save: the bytes that each rank writes. Every rank computes the same plan from the catalogue.

Theory. The boxes that the same set of living ranks holds, one after the other in the order of the catalogue, form one
*stream* of bytes. Each stream is divided among its holders: each holder writes one byte range, its *stretch*. The
lengths of the stretches make the loads of all holders as equal as possible. Streams with few holders are divided
first, because they leave the least choice. Laid end to end, the stretches run ``copies`` times through the stream
(after its end they continue at its start). So they cover every byte ``copies`` times, and no stretch contains a byte
twice. The ends of a stretch are moved to offsets at which a box may be cut. A cut lies between two rows of the first
dimension that is longer than 1. So every part of a box is one contiguous byte range. All of this is arithmetic on
grids and sets of holders. Only the stretches of the calling rank become lists of boxes. The ``sources`` are all ranks
for a periodic checkpoint, and the living ranks for a last-gasp checkpoint.

Invariants:
1. The plan is a pure function of (catalogue, sources, copies): integers only, ties broken by name and rank.
2. Every box that has a living holder is covered by the parts of exactly ``min(copies, living holders)`` ranks.
3. No rank writes an element of a box twice, and every part lies inside one box that the rank holds.
4. ``uncovered`` names the regions that no living rank holds (the first :data:`UNCOVERED_MAX` of them). A plan with such
   a region must not be written.
5. The cost grows with (distinct pairs of grid and shape) x ranks + tensors, not with ranks x tensors.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from functools import reduce
from itertools import accumulate
from typing import TYPE_CHECKING

import msgspec
import numpy as np
from numpy.typing import NDArray

from holdfast.errors import StateError
from holdfast.store.layouts.coverage import missing
from holdfast.store.layouts.layout import DTYPE_SIZE_BYTES, Box, Catalogue, subtract
from holdfast.store.layouts.shardings import HeldBoxes
from holdfast.text import noun_of

if TYPE_CHECKING:
    from holdfast.store.layouts.shardings import Integers

PART_SIZE_BYTES_MIN = 1024 * 1024
"""Approximate smallest size of a part of a box: each part costs a header entry and a read."""

UNCOVERED_MAX = 1000
NAMED_MAX = 4  # names in a message


class WriteItem(msgspec.Struct, frozen=True, order=True):
    """A part of a tensor that one rank writes.

    ``part`` lies inside ``box``, which the rank holds. Both are in the coordinates of the complete tensor.
    """

    fqn: str
    box: Box
    part: Box

    def byte_range(self, item_size_bytes: int) -> tuple[int, int]:
        """Return the byte range [start, stop) of the part within the bytes of its box.

        ``item_size_bytes`` is the size of one element.
        """
        before, per_row = 0, item_size_bytes
        for d in reversed(range(len(self.box.sizes))):
            before += (self.part.offsets[d] - self.box.offsets[d]) * per_row
            per_row *= self.box.sizes[d]
        return before, before + self.part.numel * item_size_bytes


class SavePlan(msgspec.Struct, frozen=True):
    """The plan of one save: the parts of the state that each rank writes. A source is a rank that may write.

    Attributes:
        sources: the ranks that may write.
        copies: number of copies of each part.
        shares: the parts that each source writes, by rank.
        uncovered: tensor name and box of each region that no source holds.
        absent: ranks that have declared no layout.
    """

    sources: tuple[int, ...]
    copies: int
    shares: Mapping[int, tuple[WriteItem, ...]]
    uncovered: tuple[tuple[str, Box], ...]
    absent: tuple[int, ...]

    def items(self, rank: int) -> tuple[WriteItem, ...]:
        """Return the parts that ``rank`` writes, sorted by tensor name and region."""
        return self.shares.get(rank, ())

    @property
    def complete(self) -> bool:
        """True if a complete checkpoint can be written: every element of every tensor has a living holder."""
        return not self.uncovered and not self.absent

    def why_incomplete(self) -> str:
        """Return one line that names the missing layouts and boxes, or an empty string if the plan is complete."""
        reasons = [f"{_ranks(self.absent)} declared no layout"] if self.absent else []
        if self.uncovered:
            reasons.append(f"no living rank holds {_some([f'{fqn}{box}' for fqn, box in self.uncovered])}")
        return "; ".join(reasons)


def plan(catalogue: Catalogue, sources: frozenset[int], copies: int = 1) -> SavePlan:
    """Return the plan of a save. The share of a rank is computed when it is first read from the plan.

    Args:
        catalogue: all tensors and their holders, including dead ranks.
        sources: living ranks with an intact state, which can write it.
        copies: number of ranks that write each box; fewer if the box has fewer holders.

    Raises:
        StateError: a source is not in the catalogue, or ``copies`` < 1.
    """
    if copies < 1:
        raise StateError(f"copies={copies}: at least one copy of each part must be written")
    if not sources <= catalogue.ranks:
        raise StateError(f"{_ranks(sorted(sources - catalogue.ranks))} declared no layout")
    shares = _Shares(catalogue, sources, copies)
    return SavePlan(tuple(sorted(sources)), copies, shares, tuple(shares.uncovered()), catalogue.absent)


class _Shares(Mapping[int, tuple[WriteItem, ...]]):
    """The parts that each rank writes, as a mapping by rank. The entry of a rank is computed when it is first read."""

    def __init__(self, catalogue: Catalogue, sources: frozenset[int], copies: int) -> None:
        self.catalogue = catalogue
        self.sources = sources
        self.copies = copies
        self.groups: dict[tuple[int, ...], int] = {}
        # Per grid: the number of the group of living holders of each entry; -1: no living holder.
        self.living = [
            np.array([self._group(ranks) for ranks in grid.holders], np.int64) for grid in catalogue.grids
        ]
        # Tensors without elements are in no stream.
        self.kinds = {kind: tensors for kind, tensors in catalogue.kinds.items() if 0 not in kind[1]}
        self.lost: list[tuple[tuple[int, tuple[int, ...]], list[Box]]] = []
        self.sizes = self._measure()
        self.fills = self._deal()
        self.made: dict[int, tuple[WriteItem, ...]] = {}

    def __len__(self) -> int:
        return len(self.sources)

    def __iter__(self) -> Iterator[int]:
        return iter(sorted(self.sources))

    def _group(self, ranks: Sequence[int]) -> int:
        alive = tuple(rank for rank in ranks if rank in self.sources)
        return self.groups.setdefault(alive, len(self.groups)) if alive else -1

    def _groups_of(self, grid: int, held: HeldBoxes) -> Integers:
        """Return, per box of ``held``, the number of the group of living ranks that hold the box; -1 if none does."""
        groups = self.living[grid][held.entry]
        for place, ranks in held.joined.items():
            groups[place] = self._group(ranks)
        return groups

    def _measure(self) -> Integers:
        """Return the size of each group's stream in bytes. Add the regions without a living holder to ``lost``."""
        sizes = np.zeros(len(self.groups), np.int64)
        for kind, tensors in self.kinds.items():
            held = self.catalogue.grids[kind[0]].on(kind[1])
            groups = self._groups_of(kind[0], held)
            if len(sizes) < len(self.groups):
                sizes = np.append(sizes, np.zeros(len(self.groups) - len(sizes), np.int64))
            weight = sum(DTYPE_SIZE_BYTES[tensor.dtype] for tensor in tensors)
            alive = groups >= 0
            elements = reduce(
                np.multiply, held.sizes[alive].T, np.ones((), np.int64)
            )  # faster than prod(axis=1)
            np.add.at(sizes, groups[alive], elements * weight)
            holes = self._holes(kind, held, alive)
            if holes:
                self.lost.append((kind, holes))
        return sizes

    def _holes(
        self, kind: tuple[int, tuple[int, ...]], held: HeldBoxes, alive: NDArray[np.bool_]
    ) -> list[Box]:
        """Return the uncovered regions: boxes without a living holder, then regions that no rank ever declared."""
        grid, shape = self.catalogue.grids[kind[0]], kind[1]
        dead = held.boxes(np.nonzero(~alive)[0])
        if grid.exact:
            return dead
        kept = held.boxes(np.nonzero(alive)[0])
        rest = missing(shape, kept)
        if not rest:
            return []
        lost = sorted(box for box in dead if any(box.intersect(region) for region in rest))
        return [*lost, *(piece for region in rest for piece in subtract(region, lost))]

    def uncovered(self) -> list[tuple[str, Box]]:
        """Return tensor name and region of the boxes that no living rank holds: the first ``UNCOVERED_MAX`` of them."""
        lost = {tensor.fqn: boxes for kind, boxes in self.lost for tensor in self.kinds[kind]}
        if not self.sources:
            lost |= {t.fqn: [Box.whole(t.shape)] for t in self.catalogue.tensors if not t.size_bytes}
        found: list[tuple[str, Box]] = []
        for fqn in sorted(lost):
            found += [(fqn, box) for box in lost[fqn][: UNCOVERED_MAX - len(found)]]
        return found

    def _deal(self) -> dict[tuple[int, ...], list[int]]:
        """Divide the stream of each group of several holders among the holders.

        Return, by group, the start of each holder's stretch in bytes, and the end of the last stretch.
        """
        loads = np.zeros(self.catalogue.world, np.int64)
        several: list[tuple[int, tuple[int, ...], int]] = []
        for ranks, number in self.groups.items():
            if len(ranks) == 1:
                loads[ranks[0]] += self.sizes[number]
            else:
                several.append((len(ranks), ranks, int(self.sizes[number])))
        fills: dict[tuple[int, ...], list[int]] = {}
        for count, ranks, size_bytes in sorted(several):
            members = np.array(ranks, np.int64)
            shares = _level(loads[members], size_bytes, min(self.copies, count))
            loads[members] += shares
            fills[ranks] = [0, *np.cumsum(shares).tolist()]
        return fills

    def __getitem__(self, rank: int) -> tuple[WriteItem, ...]:
        if rank not in self.sources:
            raise KeyError(rank)
        if rank not in self.made:
            self.made[rank] = self._make(rank)
        return self.made[rank]

    def _make(self, rank: int) -> tuple[WriteItem, ...]:
        items: list[WriteItem] = []
        for ranks, boxes in self._streams(rank).items():
            items += [WriteItem(fqn, box, part) for fqn, box, part in self._stretch(ranks, rank, boxes)]
        # Tensors without bytes are in no stream: their first holders write them.
        empty = [tensor for tensor in self.catalogue.tensors if not tensor.size_bytes]
        for tensor in empty:
            alive = sorted(self.catalogue.grids[tensor.grid].ranks & self.sources) or [min(self.sources)]
            if rank in alive[: self.copies]:
                items.append(WriteItem(tensor.fqn, Box.whole(tensor.shape), Box.whole(tensor.shape)))
        return tuple(sorted(items))

    def _streams(self, rank: int) -> dict[tuple[int, ...], list[tuple[str, Box, int]]]:
        """Return the streams that ``rank`` holds, by group of holders, as lists of (tensor, box, size in bytes)."""
        names = list(self.groups)
        mine = np.array([rank in ranks for ranks in names] + [False])  # the last one: no living holder
        found: dict[tuple[int, tuple[int, ...]], list[tuple[int, Box]]] = {}
        own = [grid.entries_of(rank) for grid in self.catalogue.grids]
        for kind in self.kinds:
            grid = self.catalogue.grids[kind[0]]
            if own[kind[0]]:
                held = grid.on(kind[1], own[kind[0]])
                groups = self._groups_of(kind[0], held)
                places = np.nonzero(mine[groups])[0]
                found[kind] = list(zip(groups[places].tolist(), held.boxes(places), strict=True))
        streams: dict[tuple[int, ...], list[tuple[str, Box, int]]] = {}
        for tensor in self.catalogue.tensors:
            item_size_bytes = DTYPE_SIZE_BYTES[tensor.dtype]
            for group, box in found.get((tensor.grid, tensor.shape), ()):
                stream = streams.setdefault(names[group], [])
                stream.append((tensor.fqn, box, box.numel * item_size_bytes))
        return streams

    def _stretch(
        self, ranks: tuple[int, ...], rank: int, stream: Sequence[tuple[str, Box, int]]
    ) -> Iterator[tuple[str, Box, Box]]:
        """Yield (tensor, box, part of the box) for each part of one stream that ``rank`` writes."""
        if len(ranks) == 1:
            yield from ((fqn, box, box) for fqn, box, _ in stream)
            return
        ends = list(accumulate((size_bytes for _, _, size_bytes in stream), initial=0))
        place, total = ranks.index(rank), ends[-1]
        first, last = (_cuttable(at, stream, ends) for at in self.fills[ranks][place : place + 2])
        start = first % total
        stop = last - first + start
        # After its end the stream begins again.
        ranges = [(0, total)] if stop - start == total else [(start, min(stop, total)), (0, stop - total)]
        for low, high in ranges:
            index = bisect_right(ends, low) - 1
            while ends[index] < high:
                fqn, box, size_bytes = stream[index]
                part = max(low - ends[index], 0), min(high - ends[index], size_bytes)
                yield fqn, box, _slab(box, size_bytes, *part)
                index += 1


def _level(loads: Integers, size_bytes: int, copies: int) -> Integers:
    """Return how many bytes of one stream each holder writes. The loads of the holders become as equal as possible.

    Args:
        loads: bytes that each holder writes already.
        size_bytes: size of the stream. No holder writes more, because none writes a byte twice.
        copies: the number of times that each byte is written.
    """
    if copies == len(loads):
        return np.full(len(loads), size_bytes, np.int64)
    wanted = copies * size_bytes
    # For a common load L the holders take sum(clip(L - load, 0, size)) bytes: linear in L between these levels.
    levels = np.concatenate([loads, loads + size_bytes])
    order = np.argsort(levels, kind="stable")
    levels = levels[order]
    slopes = np.cumsum(np.where(order < len(loads), 1, -1))
    taken = np.concatenate([[0], np.cumsum(slopes[:-1] * np.diff(levels))])
    piece = int(np.searchsorted(taken, wanted, side="right")) - 1
    level = int(levels[piece]) + ((wanted - int(taken[piece])) // int(slopes[piece]) if slopes[piece] else 0)
    shares: Integers = np.clip(level - loads, 0, size_bytes)
    rest = wanted - int(shares.sum())
    shares[np.nonzero((shares < size_bytes) & (loads + shares == level))[0][:rest]] += 1
    return shares


def _cuttable(at: int, stream: Sequence[tuple[str, Box, int]], ends: Sequence[int]) -> int:
    """Return the byte offset nearest to ``at`` for a cut of the stream. This offset never falls as ``at`` grows."""
    total = ends[-1]
    rounds, at = divmod(at, total)
    index = bisect_right(ends, at) - 1
    _, box, size_bytes = stream[index]
    step, pieces = _steps(box, size_bytes)
    inside = at - ends[index]
    last = (pieces - 1) * step  # the last piece is the longest: it takes the remainder
    nearest = min((2 * inside + step) // (2 * step) * step, last)
    if 2 * inside >= last + size_bytes:
        nearest = size_bytes
    return rounds * total + ends[index] + nearest


def _axis(box: Box) -> int:
    """Return the dimension along which a box is cut: each slice along it is one contiguous byte range."""
    return next((d for d, size in enumerate(box.sizes) if size > 1), 0)


def _steps(box: Box, size_bytes: int) -> tuple[int, int]:
    """Return the size in bytes of the smallest part into which a box may be cut, and the number of such parts."""
    per_row = size_bytes // (box.sizes[_axis(box)] if box.sizes else 1)
    step = -(-PART_SIZE_BYTES_MIN // per_row) * per_row
    return min(step, size_bytes), max(1, size_bytes // step)


def _slab(box: Box, size_bytes: int, low: int, high: int) -> Box:
    """Return the bytes ``low`` to ``high`` of a box as a box. Both offsets lie between two rows."""
    if (low, high) == (0, size_bytes):
        return box
    axis = _axis(box)
    per_row = size_bytes // box.sizes[axis]
    offsets, sizes = list(box.offsets), list(box.sizes)
    offsets[axis] += low // per_row
    sizes[axis] = (high - low) // per_row
    return Box(tuple(offsets), tuple(sizes))


def _ranks(ranks: Sequence[int]) -> str:
    return f"{noun_of(len(ranks), 'rank')} {_some(ranks)}"


def _some(names: Sequence[object]) -> str:
    """Return the first few items of a list as text, for an error message."""
    more = f" and {len(names) - NAMED_MAX} more" if len(names) > NAMED_MAX else ""
    return ", ".join(str(name) for name in names[:NAMED_MAX]) + more
