"""Which extents a load needs, where they go, and in which order they are read.

Theory. A digest covers an extent, so extents are what is read. Of a stored box only those count that hold something of
a wanted region; where such a region is one range of flat elements both in the box and in the target, whole extents go
straight into place, the others are scattered. Neighbours with the same fate are one run: planned, read and scattered
at once, however small extents are.

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

WINDOW_SIZE_BYTES = 4 * 1024 * 1024  # in every processor's last cache


class LoadTarget(msgspec.Struct, frozen=True):
    """Where a box goes: ``buffer`` is writable, C-contiguous, of the box's size; ``shape`` is the global shape."""

    fqn: str
    box: Box
    dtype: str
    buffer: memoryview
    shape: Shape


class Read(msgspec.Struct):
    """Extents ``first`` to ``last`` to read: ``into`` is their place in a target, or None when they are scattered."""

    stored: StoredBox
    first: int
    last: int
    pieces: Sequence[tuple[LoadTarget, Box]]
    into: memoryview | None

    @property
    def start(self) -> int:
        """First byte in the file."""
        return self.stored.record.start + self.first * self.stored.extent_size_bytes

    @property
    def size_bytes(self) -> int:
        """Bytes of the extents."""
        stop = min(self.last * self.stored.extent_size_bytes, self.stored.record.size_bytes)
        return stop - self.first * self.stored.extent_size_bytes

    def parts(self) -> list[Box]:
        """What lies in them, in global coordinates."""
        return self.stored.regions(self.start, self.size_bytes)

    def cut(self, first: int, last: int) -> Read:
        """Some of its extents, to scatter (or to ask again)."""
        return Read(self.stored, first, last, self.pieces, None)


def reads_of(stored: StoredBox, pieces: Sequence[tuple[LoadTarget, Box]], limit_bytes: int) -> list[Read]:
    """The extents of a stored box that the pieces need, in runs of at most ``limit_bytes`` (or one extent)."""
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
"""First extent, the one after the last, who needs them, and where they go in the target (bytes) when in one piece."""


def _runs(stored: StoredBox, pieces: Sequence[tuple[LoadTarget, Box]]) -> Iterator[_Run]:
    """The extents that are needed, as long runs as have the same fate."""
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
    """Which extents (of ``each`` elements) among ``first`` to ``last`` a region needs, and where they go in the target
    (elements) when in one piece. Tensors of a model have few shapes, so the answers are kept."""
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
    """Where a region lies in the flat elements of a box: first, one after the last, and the longest gap between."""
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
    """In the order in which files hold their tensors, all files side by side; in windows, so that neighbours stay so.

    What several files give to one target comes while the processor has it in its cache, and the disk reads ahead in
    several files at once.
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
    """Group reads of adjacent bytes of one file into single calls."""
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
