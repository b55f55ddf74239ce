"""The test whether boxes cover a tensor, in a time that is bounded even for a hostile list of boxes.

Theory. Along the first dimension the edges of the boxes cut the tensor into slabs. Inside a slab every box either spans
the slab or is absent, so the test of a slab is the same test with one dimension less. Layouts of real jobs, regular or
not, have few boxes per slab. A hostile list could have many boxes in very many slabs, and would take quadratic time.
Such a list is refused.

Invariants:
1. The answer is exact: disjoint regions that together are the uncovered part of the tensor.
2. The number of compared boxes is at most ``WORK_PER_BOX`` times the number of boxes (or ``WORK_MIN``, if that is
   more). The recursion is as deep as the tensor has dimensions.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from holdfast.errors import StateError
from holdfast.store.layouts.layout import Box

WORK_PER_BOX = 256
WORK_MIN = 100_000

_Spans = tuple[tuple[int, int], ...]  # (offset, size) per dimension


def missing(shape: Sequence[int], boxes: Sequence[Box]) -> list[Box]:
    """Return the regions of a tensor of ``shape`` that no box covers. The layouts of real jobs take linear time.

    A tensor without elements counts as missing if there is no box.

    Raises:
        StateError: the boxes are cut too irregularly for an answer in reasonable time.
    """
    whole = Box.whole(shape)
    if not boxes:
        return [whole]
    if whole in boxes or _is_grid(shape, boxes):
        return []
    return uncovered(shape, boxes)


def _is_grid(shape: Sequence[int], boxes: Sequence[Box]) -> bool:
    """Return True if every combination of intervals (one per dimension, without gaps) is a box. Takes linear time."""
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


def uncovered(shape: Sequence[int], boxes: Sequence[Box]) -> list[Box]:
    """Return the regions of a tensor of ``shape`` that no box covers, in C order. All boxes must lie inside the tensor.

    Raises:
        StateError: the boxes are cut too irregularly for an answer in reasonable time.
    """
    if 0 in shape:
        return []
    spans = [tuple(zip(box.offsets, box.sizes, strict=True)) for box in boxes if box.numel]
    search = _Search(shape, max(WORK_MIN, WORK_PER_BOX * len(spans)))
    return [Box(tuple(o for o, _ in hole), tuple(s for _, s in hole)) for hole in search.holes(0, spans)]


class _Search:
    def __init__(self, shape: Sequence[int], work: int) -> None:
        self._shape = shape
        self._work = work

    def holes(self, d: int, boxes: list[_Spans]) -> list[_Spans]:
        """Return the regions that ``boxes`` leave uncovered, in the dimensions from ``d`` on."""
        if d == len(self._shape):
            return [] if boxes else [()]
        if not boxes:
            return [tuple((0, length) for length in self._shape[d:])]
        begins: dict[int, list[int]] = {}
        ends: dict[int, list[int]] = {}
        for index, box in enumerate(boxes):
            offset, size = box[d]
            begins.setdefault(offset, []).append(index)
            ends.setdefault(offset + size, []).append(index)
        edges = sorted({0, self._shape[d], *begins, *ends})
        active: dict[int, _Spans] = {}
        found: list[_Spans] = []
        before: list[_Spans] = []
        for start, stop in pairwise(edges):
            for index in ends.get(start, ()):
                del active[index]
            active |= {index: boxes[index] for index in begins.get(start, ())}
            self._spend(len(active))
            inner = self.holes(d + 1, list(active.values()))
            if inner and inner == before:  # the previous slab has the same holes: these are extended
                grown = found[-len(inner) :]
                found[-len(inner) :] = [((h[0][0], stop - h[0][0]), *h[1:]) for h in grown]
            else:
                found += [((start, stop - start), *hole) for hole in inner]
            before = inner
        return found

    def _spend(self, work: int) -> None:
        self._work -= work + 1
        if self._work < 0:
            raise StateError("it is cut into too many parts that do not fit together")
