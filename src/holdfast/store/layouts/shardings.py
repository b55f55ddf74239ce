"""Regular cuts of tensors and the ranks that hold the parts, once for all tensors that are cut in the same way.

Theory. Device meshes cut tensors like ``torch.chunk``: a dimension of n elements into p parts of ceil(n / p), the
last ones shorter or empty. A nested cut cuts such a part again. Each of these cuts is a *step*: (number of parts,
index of the part that a rank holds). A *cell* is the steps of each dimension. A cell contains no lengths, so one
*grid* (a set of cells) describes all tensors that are cut in the same way, whatever their shapes. A job has a few
grids (sharded, replicated, per pipeline stage), each as large as the number of ranks. The boxes of a tensor are
computed from its grid and its shape. For a layout that is not a regular cut, the grid of each shape is a list of
boxes.

Invariants:
1. A grid has cells or boxes, not both. Cells, boxes and ranks are sorted, without duplicates.
2. Every step has at least two parts. A dimension that is not cut has no step.
3. Cells of a grid that are all parts of the same cuts never overlap, on any shape. If the grid has as many such cells
   as the cuts have parts, the cells cover any shape exactly once (``exact``).

NumPy is imported where it computes: the agents, which read layouts and compute no boxes, start without it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from holdfast.errors import StateError
from holdfast.store.layouts.box import LENGTH_MAX, Box, Shape

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Integers = NDArray[np.int64]

DEPTH_MAX = 8
STEPS_MAX = 2**26

Cuts = tuple[tuple[tuple[int, int], ...], ...]
"""A cell: per dimension the steps (number of parts, index of one part), the outermost first.

A dimension without a step is whole.
"""


def whole_cuts(dimensions: int) -> Cuts:
    """Return the cell that is the whole tensor, for a tensor of ``dimensions`` dimensions."""
    return ((),) * dimensions


def cut(length: int, steps: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """Return (offset, size) of one part of a dimension of ``length`` elements.

    Each step (number of parts, index of one part) cuts the part that the previous step gave.
    """
    offset, size = 0, length
    for parts, index in steps:
        chunk = -(-size // parts)
        start = min(index * chunk, size)
        offset, size = offset + start, min(chunk, size - start)
    return offset, size


class Cell(msgspec.Struct, frozen=True, array_like=True):
    """One cell (part of a regular cut) and the ranks that hold it."""

    cuts: Cuts
    ranks: tuple[int, ...]


class BoxHolders(msgspec.Struct, frozen=True, array_like=True):
    """One box and the ranks that hold it."""

    offsets: Shape
    sizes: Shape
    ranks: tuple[int, ...]


class HeldBoxes(NamedTuple):
    """The distinct boxes of a grid on one shape, without empty ones. ``offsets`` and ``sizes``: [boxes, dimensions].

    ``entry`` has for each box the index of its entry (cell or box) in the grid. If several cells of the grid are the
    same box on this shape, ``joined`` maps the index of this box to all its holders.
    """

    offsets: Integers
    sizes: Integers
    entry: Integers
    joined: dict[int, tuple[int, ...]]

    def boxes(self, places: Integers) -> list[Box]:
        """Return the boxes at the indices ``places`` of the arrays."""
        rows = zip(self.offsets[places].tolist(), self.sizes[places].tolist(), strict=True)
        return [Box(tuple(offsets), tuple(sizes)) for offsets, sizes in rows]


class Grid(msgspec.Struct, frozen=True, dict=True):
    """The cells of a regular cut with their holders; for other layouts, boxes with their holders."""

    cells: tuple[Cell, ...]
    boxes: tuple[BoxHolders, ...]

    @property
    def holders(self) -> tuple[tuple[int, ...], ...]:
        """The ranks that hold each cell or box of the grid, in the order of the grid."""
        return tuple(entry.ranks for entry in self.cells or self.boxes)

    @cached_property
    def ranks(self) -> frozenset[int]:
        """All ranks that hold a cell or box of this grid."""
        return frozenset(rank for ranks in self.holders for rank in ranks)

    def entries_of(self, rank: int) -> list[int]:
        """Return the indices of the grid's cells (or boxes) that ``rank`` holds."""
        return [entry for entry, ranks in enumerate(self.holders) if rank in ranks]

    @cached_property
    def _listed(self) -> tuple[Integers, Integers]:
        """Offsets and sizes of the grid's boxes, as arrays of shape [boxes, dimensions]."""
        import numpy as np

        offsets = np.array([box.offsets for box in self.boxes], np.int64)
        return offsets, np.array([box.sizes for box in self.boxes], np.int64)

    @cached_property
    def _steps(self) -> Integers:
        """The steps of all cells: an array [step, dimension, cell, (parts, index)]; (1, 0) where a cell has no step."""
        import numpy as np

        depth = max((len(steps) for cell in self.cells for steps in cell.cuts), default=0)
        steps = np.zeros((depth, len(self.cells[0].cuts), len(self.cells), 2), np.int64)
        steps[..., 0] = 1
        for number, cell in enumerate(self.cells):
            for dimension, taken in enumerate(cell.cuts):
                for level, step in enumerate(taken):
                    steps[level, dimension, number] = step
        return steps

    @cached_property
    def _regular(self) -> bool:
        """True if all cells are parts of the same cuts: distinct cells then give distinct or empty boxes."""
        parts = self._steps[..., 0]
        return bool((parts == parts[:, :, :1]).all())

    @cached_property
    def exact(self) -> bool:
        """True if the cells are known to cover every shape exactly once. If False, they may still do so."""
        if not self.cells or not self._regular:
            return False
        return math.prod(self._steps[:, :, 0, 0].ravel().tolist()) == len(self.cells)

    def on(self, shape: Shape, among: Sequence[int] | None = None) -> HeldBoxes:
        """Return the boxes that this grid gives on a tensor of ``shape``.

        A tensor without elements has one box, the whole tensor, which all ranks of the grid hold.

        Args:
            shape: the shape of the tensor.
            among: indices of the grid's cells (or boxes) that are needed; None means all. The result may contain other
                boxes.
        """
        import numpy as np

        if 0 in shape:
            zero = np.zeros((1, len(shape)), np.int64)
            return HeldBoxes(
                zero, np.array([shape], np.int64), zero[:, 0] * 0, {0: tuple(sorted(self.ranks))}
            )
        if self.boxes:
            return HeldBoxes(*self._listed, np.arange(len(self.boxes)), {})
        # Cells that give the same box on this shape are only found among all cells.
        entries = (
            np.arange(len(self.cells)) if among is None or not self._regular else np.array(among, np.int64)
        )
        steps = self._steps if len(entries) == len(self.cells) else self._steps[:, :, entries]
        offsets = np.zeros((len(entries), len(shape)), np.int64)
        sizes = np.empty_like(offsets)
        some = np.ones(len(entries), np.bool_)
        for dimension, length in enumerate(shape):
            left: Integers = np.full(len(entries), length, np.int64)
            for level in range(len(steps)):
                parts, index = steps[level, dimension].T
                chunk = -(-left // parts)
                start = np.minimum(index * chunk, left)
                offsets[:, dimension] += start
                left = np.minimum(chunk, left - start)
            sizes[:, dimension] = left
            some &= left > 0
        full = np.nonzero(some)[0]
        held = HeldBoxes(offsets[full], sizes[full], entries[full], {})
        return held if self._regular else self._merged(held)

    def _merged(self, held: HeldBoxes) -> HeldBoxes:
        """Return ``held`` with equal boxes joined into one box that has the holders of all of them."""
        import numpy as np

        first: dict[tuple[int, ...], int] = {}
        joined: dict[int, set[int]] = {}
        keep: list[int] = []
        for number, row in enumerate(np.concatenate([held.offsets, held.sizes], axis=1).tolist()):
            place = first.setdefault(tuple(row), len(keep))
            if place == len(keep):
                keep.append(number)
            else:
                joined.setdefault(place, set(self.cells[int(held.entry[keep[place]])].ranks)).update(
                    self.cells[int(held.entry[number])].ranks
                )
        merged = {place: tuple(sorted(ranks)) for place, ranks in joined.items()}
        return HeldBoxes(held.offsets[keep], held.sizes[keep], held.entry[keep], merged)

    def check(self, world: int) -> None:
        """Raise an error if the grid breaks an invariant.

        Args:
            world: the number of ranks.

        Raises:
            StateError: the error names the broken rule.
        """
        if bool(self.cells) == bool(self.boxes):
            raise StateError("catalogue: a grid needs cells or parts, and not both")
        if any(a.cuts >= b.cuts for a, b in pairwise(self.cells)) or any(
            (a.offsets, a.sizes) >= (b.offsets, b.sizes) for a, b in pairwise(self.boxes)
        ):
            raise StateError("catalogue: the cells or parts of a grid are not sorted and unique")
        for ranks in self.holders:
            if not ranks or ranks[0] < 0 or ranks[-1] >= world or any(a >= b for a, b in pairwise(ranks)):
                raise StateError("catalogue: the ranks of a cell are not ascending numbers below the world")
        for cell in self.cells:
            check_cuts(cell.cuts)
        dimensions = {len(cell.cuts) for cell in self.cells} | {len(box.sizes) for box in self.boxes}
        if len(dimensions) != 1:
            raise StateError("catalogue: the cells of a grid differ in their dimensions")
        depth = max((len(steps) for cell in self.cells for steps in cell.cuts), default=0)
        if depth * max(dimensions) * len(self.cells) > STEPS_MAX:
            raise StateError("catalogue: a grid is cut too often")


def check_cuts(cuts: Cuts) -> None:
    """Raise an error if ``cuts`` is not a valid cell: per dimension, steps (number of parts, index of one part).

    Raises:
        StateError: a step has less than two parts, or an impossible index; or a dimension has too many steps.
    """
    for steps in cuts:
        if len(steps) > DEPTH_MAX:
            raise StateError(f"a dimension is cut {len(steps)} times; the limit is {DEPTH_MAX}")
        for parts, index in steps:
            if not (2 <= parts <= LENGTH_MAX and 0 <= index < parts):
                raise StateError(f"part {index} of {parts} is no cut")
