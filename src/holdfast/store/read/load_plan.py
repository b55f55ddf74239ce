"""The extents (pieces of files) that a load needs, their places in the targets, and the order of the reads.

Theory. A digest covers an extent, so whole extents are read. Of a stored box only the extents with a part of a wanted
region are needed. If that region is one range of flat elements both in the box and in the target, whole extents are
read into place. The others are scattered. Neighbours that are treated alike are one run: planned, read and scattered
together, however small the extents are.

Invariants:
1. Every element of every wanted region lies in exactly one run of each stored box that was chosen for it.
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
    """The target of a box. ``buffer`` is writable, C-contiguous, of the box's size; ``shape`` is the global shape."""

    fqn: str
    box: Box
    dtype: str
    buffer: memoryview
    shape: Shape


class Read(msgspec.Struct):
    """The extents ``first`` to ``last`` to read.

    ``into`` is their place in a target, or None when they are scattered.
    """

    stored: StoredBox
    first: int
    last: int
    pieces: Sequence[tuple[LoadTarget, Box]]
    into: memoryview | None

    @property
    def start(self) -> int:
        """Offset of the first byte in the file."""
        return self.stored.record.start + self.first * self.stored.extent_size_bytes

    @property
    def size_bytes(self) -> int:
        """Total size of the extents in bytes."""
        stop = min(self.last * self.stored.extent_size_bytes, self.stored.record.size_bytes)
        return stop - self.first * self.stored.extent_size_bytes

    def parts(self) -> list[Box]:
        """Return the regions of the extents, in global coordinates."""
        return self.stored.regions(self.start, self.size_bytes)

    def cut(self, first: int, last: int) -> Read:
        """Return a read of extents ``first`` to ``last`` whose bytes are copied to their places after the read."""
        return Read(self.stored, first, last, self.pieces, None)


def reads_of(stored: StoredBox, pieces: Sequence[tuple[LoadTarget, Box]], limit_bytes: int) -> list[Read]:
    """Return the extents of a stored box that the pieces need, in runs of at most ``limit_bytes`` (or one extent)."""
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
    """Yield the needed extents in the longest runs that are treated alike."""
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
    """Return the extents (of ``each`` elements) among ``first`` to ``last`` that a region needs, as runs.

    The third number of a run is its offset in the target in elements; None: it is scattered. Tensors of a model have
    few shapes, so the answers are cached.
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
    """Return the flat elements of a box that a region spans: first, one after the last, and the longest gap."""
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
    """Return the reads in the order in which files hold their tensors, all files in parallel.

    Within a window, neighbours in a file stay neighbours. The parts of one target from several files come while they
    are in the processor's cache, and the disk reads ahead in several files at once.
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
    """Return reads of adjacent bytes of one file, grouped into single calls."""
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
