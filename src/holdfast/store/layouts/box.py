"""Boxes (rectangular regions of tensors) and their arithmetic.

Offsets and sizes are in elements, one number per dimension. A scalar has no dimension and exactly one element.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import msgspec

from holdfast.errors import StateError

Shape = tuple[int, ...]
DIMENSIONS_MAX = 32
LENGTH_MAX = 2**48
"""Largest number of elements along one dimension, and of parts into which a dimension can be cut."""


class Box(msgspec.Struct, frozen=True, order=True, array_like=True):
    """A region of a tensor: ``offsets[d] <= index[d] < offsets[d] + sizes[d]`` in every dimension d (in elements)."""

    offsets: Shape
    sizes: Shape

    @staticmethod
    def whole(shape: Sequence[int]) -> Box:
        """Return the box of a complete tensor."""
        return Box((0,) * len(shape), tuple(shape))

    @property
    def numel(self) -> int:
        """Number of elements (1 for a scalar)."""
        return math.prod(self.sizes)

    @property
    def ends(self) -> Shape:
        """The first index after the box, per dimension."""
        return tuple(o + s for o, s in zip(self.offsets, self.sizes, strict=True))

    def intersect(self, other: Box) -> Box | None:
        """Return the region common to both boxes; None if it has no element."""
        offsets: list[int] = []
        sizes: list[int] = []
        for a, a_size, b, b_size in zip(self.offsets, self.sizes, other.offsets, other.sizes, strict=True):
            offset = max(a, b)
            size = min(a + a_size, b + b_size) - offset
            if size <= 0:
                return None
            offsets.append(offset)
            sizes.append(size)
        return Box(tuple(offsets), tuple(sizes))

    def contains(self, other: Box) -> bool:
        """Return True if every element of ``other`` is in this box."""
        return all(
            a <= c and c + d <= a + b
            for a, b, c, d in zip(self.offsets, self.sizes, other.offsets, other.sizes, strict=True)
        )

    def __str__(self) -> str:
        inside = ", ".join(f"{o}:{o + s}" for o, s in zip(self.offsets, self.sizes, strict=True))
        return f"[{inside}]"


class Extent(msgspec.Struct, frozen=True, array_like=True):
    """A byte range [``start``, ``stop``) of one box of a tensor, in C order. (An extent of a file is something else.)

    The code that compares copies, or transfers state, names the bytes in this form.

    Example:
        >>> str(Extent("fc.weight", Box((0, 0), (2, 4)), 0, 32))
        'fc.weight[0:2, 0:4]'
    """

    fqn: str
    box: Box
    start: int
    stop: int

    @property
    def size_bytes(self) -> int:
        """Number of bytes; negative if an invalid request has ``stop`` before ``start``."""
        return self.stop - self.start

    def __str__(self) -> str:
        return f"{self.fqn}{self.box}"


def is_shape(shape: Sequence[int]) -> bool:
    """Return True if the number of dimensions and each length of a shape are within Holdfast's limits."""
    return len(shape) <= DIMENSIONS_MAX and all(0 <= n <= LENGTH_MAX for n in shape)


def subtract(box: Box, covers: Iterable[Box]) -> list[Box]:
    """Return the part of ``box`` that no box of ``covers`` covers, as disjoint boxes."""
    rest = [box] if box.numel else []
    for cover in covers:
        if not rest:
            break
        rest = [piece for part in rest for piece in _minus(part, cover)]
    return rest


def _minus(box: Box, cover: Box) -> list[Box]:
    """Return the region of ``box`` outside of ``cover``, as at most two boxes per dimension."""
    common = box.intersect(cover)
    if common is None:
        return [box]
    pieces: list[Box] = []
    offsets, sizes = list(box.offsets), list(box.sizes)
    for d in range(len(offsets)):
        before = common.offsets[d] - offsets[d]
        after = offsets[d] + sizes[d] - common.ends[d]
        if before:
            pieces.append(_with(offsets, sizes, d, offsets[d], before))
        if after:
            pieces.append(_with(offsets, sizes, d, common.ends[d], after))
        offsets[d], sizes[d] = common.offsets[d], common.sizes[d]
    return pieces


def _with(offsets: Sequence[int], sizes: Sequence[int], d: int, offset: int, length: int) -> Box:
    return Box((*offsets[:d], offset, *offsets[d + 1 :]), (*sizes[:d], length, *sizes[d + 1 :]))


def flat_range_boxes(sizes: Sequence[int], start: int, stop: int) -> list[Box]:
    """Return boxes that together cover the elements [start, stop), in C order, of an array of shape ``sizes``.

    There are at most ``2 * dimensions - 1`` boxes, in C order. Each box is contiguous in memory. Use this to declare
    the shards of an optimizer that cuts flattened parameters (ZeRO, Megatron's distributed optimizer).

    Raises:
        StateError: the range is outside the array.
    """
    if not 0 <= start <= stop <= math.prod(sizes):
        raise StateError(f"flat range {start}:{stop} is outside an array of {list(sizes)}")
    if start == stop:
        return []
    if not sizes:
        return [Box((), ())]
    inner = math.prod(sizes[1:])
    boxes: list[Box] = []
    first, last = -(-start // inner), stop // inner
    if first > last:  # inside one row
        return _prefixed(
            first - 1, flat_range_boxes(sizes[1:], start - (first - 1) * inner, stop - last * inner)
        )
    if start < first * inner:
        boxes += _prefixed(first - 1, flat_range_boxes(sizes[1:], start - (first - 1) * inner, inner))
    if first < last:
        boxes.append(Box((first, *(0,) * (len(sizes) - 1)), (last - first, *sizes[1:])))
    if last * inner < stop:
        boxes += _prefixed(last, flat_range_boxes(sizes[1:], 0, stop - last * inner))
    return boxes


def flat_regions(box: Box, start: int, stop: int) -> list[Box]:
    """Return boxes that together cover the elements [start, stop), in C order, of ``box``.

    The result is in C order, in the coordinates of the complete tensor.
    """
    return [
        Box(tuple(a + b for a, b in zip(part.offsets, box.offsets, strict=True)), part.sizes)
        for part in flat_range_boxes(box.sizes, start, stop)
    ]


def _prefixed(row: int, boxes: Iterable[Box]) -> list[Box]:
    return [Box((row, *box.offsets), (1, *box.sizes)) for box in boxes]
