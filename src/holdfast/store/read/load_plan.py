"""The extents (pieces of files) that a load needs, their positions in the targets, and the order of the reads.

Theory. A digest covers an extent, so extents are read whole. Of a stored box, only the extents with elements of a
wanted region are needed. If that region is contiguous in C order, both in the box and in the target, extents inside it
are read directly into the target. All other extents are *scattered*: read into a scratch buffer, from which their
elements are copied. Neighbouring extents that are all read directly, or all scattered, form one *run*. They are
planned, read and scattered together, however small they are.

Invariants:
1. Every element of a wanted region lies in exactly one run of each stored box that was chosen for this region.
2. A run is not longer than a batch, or it is one extent.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import TypeAlias

import msgspec

from holdfast.store.layouts.layout import DTYPE_SIZE_BYTES, Box, Shape, flat_regions
from holdfast.store.read.validation import StoredBox

WINDOW_SIZE_BYTES = 4 * 1024 * 1024  # fits into the last-level cache of any processor


class LoadTarget(msgspec.Struct, frozen=True):
    """One box of a tensor to load, and a writable, C-contiguous ``buffer`` of the box's size for its bytes.

    ``shape`` is the shape of the complete tensor.
    """

    fqn: str
    box: Box
    dtype: str
    buffer: memoryview
    shape: Shape


class Read(msgspec.Struct):
    """One read: the extents ``first`` to ``last`` (exclusive) of a stored box.

    ``pieces`` are the pairs (target, region) to fill. ``into`` is the part of a target's buffer to read into. If it is
    None, the bytes are read into a scratch buffer, and their elements are then copied to the targets.
    """

    stored: StoredBox
    first: int
    last: int
    pieces: Sequence[tuple[LoadTarget, Box]]
    into: memoryview | None

    @property
    def start(self) -> int:
        """File offset of the first byte of the extents."""
        return self.stored.record.start + self.first * self.stored.extent_size_bytes

    @property
    def size_bytes(self) -> int:
        """Total size of the extents in bytes."""
        stop = min(self.last * self.stored.extent_size_bytes, self.stored.record.size_bytes)
        return stop - self.first * self.stored.extent_size_bytes

    def parts(self) -> list[Box]:
        """Return the regions whose elements the extents hold, in the coordinates of the complete tensor."""
        return self.stored.regions(self.start, self.size_bytes)

    def cut(self, first: int, last: int) -> Read:
        """Return a read of only the extents ``first`` to ``last`` for the same targets, through a scratch buffer."""
        return Read(self.stored, first, last, self.pieces, None)


def reads_of(stored: StoredBox, pieces: Sequence[tuple[LoadTarget, Box]], limit_bytes: int) -> list[Read]:
    """Return the reads of a stored box for ``pieces`` (pairs of target and region), of at most ``limit_bytes`` each.

    An extent larger than ``limit_bytes`` is one read.
    """
    step = max(1, limit_bytes // stored.extent_size_bytes)
    reads: list[Read] = []
    for first, last, needed, place in _runs(stored, pieces):
        for at in range(first, last, step):
            read = Read(stored, at, min(at + step, last), needed, None)
            if place is not None:
                goal = place + (at - first) * stored.extent_size_bytes
                read.into = needed[0][0].buffer[goal : goal + read.size_bytes]
            reads.append(read)
    return reads


_Run: TypeAlias = tuple[int, int, Sequence[tuple[LoadTarget, Box]], int | None]
"""First extent, one after the last, the pieces that need them, offset in the target in bytes (None: scattered)."""


def _runs(stored: StoredBox, pieces: Sequence[tuple[LoadTarget, Box]]) -> Iterator[_Run]:
    """Yield runs: neighbouring extents that the same ``pieces`` (target, region) need.

    The extents of a run are all read directly, or all scattered.
    """
    box, item = stored.record.box, DTYPE_SIZE_BYTES[stored.record.dtype]
    each, count = stored.extent_size_bytes // item, len(stored.record.digests)
    if len(pieces) > 1:
        for n in range(count):
            parts = flat_regions(box, n * each, min((n + 1) * each, box.numel))
            needed = [(t, r) for t, r in pieces if any(part.intersect(r) is not None for part in parts)]
            if len(needed) == 1:
                ((target, region),) = needed
                for a, b, place in _fates(box, region, target.box, each, n, n + 1):
                    yield a, b, needed, None if place is None else place * item
            elif needed:
                yield n, n + 1, needed, None
        return
    ((target, region),) = pieces
    for a, b, place in _fates(box, region, target.box, each, 0, count):
        yield a, b, pieces, None if place is None else place * item


@lru_cache(maxsize=64)
def _fates(
    box: Box, region: Box, goal_box: Box, each: int, first: int, last: int
) -> tuple[tuple[int, int, int | None], ...]:
    """Return the runs of extents, among ``first`` to ``last``, that hold elements of a region of a stored box.

    A run is (first extent, index after the last extent, offset in the target). The offset is in elements. It is None if
    the elements are copied from a scratch buffer. An extent has ``each`` elements. Results are cached: a model has few
    shapes.
    """
    start, stop, gap = _spread(box, region)
    first, last = max(start // each, first), min(-(-stop // each), last)
    if gap >= each:  # whole extents lie between its rows
        return tuple(
            (n, n + 1, None)
            for n in range(first, last)
            if any(
                part.intersect(region) is not None
                for part in flat_regions(box, n * each, min((n + 1) * each, box.numel))
            )
        )
    goal, _, holes = _spread(goal_box, region)
    if gap or holes:
        return ((first, last, None),) if first < last else ()
    low = min(max(-(-start // each), first), last)
    high = last if stop == box.numel else max(low, min(stop // each, last))
    runs = ((first, low, None), (low, high, goal + low * each - start), (high, last, None))
    return tuple(run for run in runs if run[0] < run[1])


def _spread(box: Box, region: Box) -> tuple[int, int, int]:
    """Return start and end (exclusive) of ``region`` among the elements of ``box`` in C order, and its longest gap.

    A gap is a run of elements of the box that lies between two elements of the region and is not part of it.
    """
    start, span, gap, stride = 0, 1, 0, 1
    for offset, size, at, length in zip(
        reversed(region.offsets),
        reversed(region.sizes),
        reversed(box.offsets),
        reversed(box.sizes),
        strict=True,
    ):
        start += (offset - at) * stride
        if size > 1:
            gap = max(gap, stride - span)
        span += (size - 1) * stride
        stride *= length
    return start, start + span, gap


def in_order(reads: list[Read]) -> list[Read]:
    """Return the reads in an order that advances through all files at the same pace.

    The reads are sorted by tensor, and cut into windows of ``WINDOW_SIZE_BYTES``. The reads of a window are grouped by
    file, and are in the order of their offsets in the file. The parts of one target that lie in several files are then
    in one window, so they are read while the target is in the processor's cache. The disk can read ahead in each file.
    """

    def place(read: Read) -> tuple[int, str, int]:
        record = read.stored.record
        return -DTYPE_SIZE_BYTES[record.dtype], record.fqn, read.first

    reads.sort(key=place)
    done, keys = 0, []
    for n, read in enumerate(reads):
        keys.append((done // WINDOW_SIZE_BYTES, read.stored.name, read.start, n))
        done += read.size_bytes
    return [reads[key[-1]] for key in sorted(keys)]


def batches_of(reads: Sequence[Read], limit_bytes: int) -> list[list[Read]]:
    """Group reads of adjacent bytes of one file into batches of at most ``limit_bytes``. One call reads a batch."""
    batches: list[list[Read]] = []
    size_bytes = 0
    for read in reads:
        previous = batches[-1][-1] if batches else None
        adjacent = (
            previous is not None
            and previous.stored.name == read.stored.name
            and (previous.into is None) == (read.into is None)
            and previous.start + previous.size_bytes == read.start
            and size_bytes + read.size_bytes <= limit_bytes
        )
        if adjacent:
            batches[-1].append(read)
            size_bytes += read.size_bytes
        else:
            batches.append([read])
            size_bytes = read.size_bytes
    return batches
