"""The position of each slice of a MindSpore training within the tensor that was cut.

Theory. The device matrix arranges the ranks of a pipeline stage in a grid, so each rank has coordinates. The
coordinates along the axes that cut a dimension give the index of the rank's part in that dimension. Ranks with the same
indices in all dimensions hold copies. Optimizer parallelism cuts these copies again along the first dimension into
``optimizer_parts`` parts, one per rank. The ranks with copies are divided, in ascending order, into groups of
``optimizer_parts`` ranks, and each group holds all parts. The length of a part is the length of its slice. For uneven
parts the strategy file gives the lengths (``rows``).

Invariants:
1. Parts of different index never overlap, and all parts together are the tensor.
2. A part without a slice, or a slice with another shape than its part, is an error: nothing is guessed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from holdfast.store.layouts.box import Box, Shape, is_shape
from holdfast.store.mindspore.strategy import WHOLE_GROUP, Cut
from holdfast.text import ranges

if TYPE_CHECKING:
    from holdfast.store.layouts.shardings import Integers


class Division(NamedTuple):
    """The division of a tensor: the number of ``parts`` per dimension, and the part of each rank.

    ``part_of`` [ranks, dimensions] has the index of the rank's part in each dimension.
    """

    parts: Shape
    part_of: Integers


class PlacedSlices(NamedTuple):
    """The shape of a tensor and its boxes, each with the ranks (within the stage) whose files have this box."""

    shape: Shape
    holders: dict[Box, tuple[int, ...]]


@lru_cache(maxsize=1024)
def divide(cut: Cut, dimensions: int) -> Division:
    """Return the part of a tensor that each rank of a stage holds.

    Raises:
        ValueError: the strategy is not complete, or cuts the tensor in an unknown way.
    """
    if cut.fields > 0:
        raise ValueError(f"it is a table that is cut by {cut.fields} fields, which cannot be merged here")
    if cut.axes and len(cut.axes) != dimensions:
        raise ValueError(f"the strategy cuts {len(cut.axes)} dimensions, and its slices have {dimensions}")
    places = np.array(np.unravel_index(np.arange(cut.ranks), cut.devices), np.int64)
    parts = [math.prod(cut.devices[axis] for axis in axes) for axes in cut.axes] or [1] * dimensions
    index = np.zeros((cut.ranks, dimensions), np.int64)
    for dimension, axes in enumerate(cut.axes):
        index[:, dimension] = _number(places, cut.devices, axes)
    if cut.optimizer_parts:
        if not cut.axes:
            raise ValueError("optimizer parallelism cuts it, and the strategy has no tensor map for it")
        count, which = _optimizer_parts(cut, places)
        index[:, 0] = index[:, 0] * count + which
        parts[0] *= count
    return Division(tuple(parts), index)


def _number(places: Integers, devices: Sequence[int], axes: Sequence[int]) -> Integers:
    """Return the coordinates of each rank along several axes of the device matrix, combined into one index."""
    found: Integers = np.zeros(places.shape[1], np.int64)
    for axis in axes:
        found = found * devices[axis] + places[axis]
    return found


def _optimizer_parts(cut: Cut, places: Integers) -> tuple[int, Integers]:
    """Return the number of parts that optimizer parallelism makes, and the index of each rank's part.

    Raises:
        ValueError: the copies cannot be cut into this number of parts, or MindSpore's tools would order the parts
            in another way.
    """
    used = [axis for axes in cut.axes for axis in axes if cut.devices[axis] > 1]
    copied = [axis for axis, size in enumerate(cut.devices) if axis not in used and size > 1]
    copies = math.prod(cut.devices[axis] for axis in copied)
    count = copies if cut.optimizer_parts == WHOLE_GROUP else cut.optimizer_parts
    if not _runs(cut.devices, copied, count):
        raise ValueError(
            f"optimizer parallelism in {count} parts does not fit a device matrix {list(cut.devices)} in which "
            f"{copies} ranks hold copies"
        )
    if copied and cut.optimizer_stride != math.prod(cut.devices[copied[-1] + 1 :]):
        raise ValueError(
            f"parts of optimizer parallelism {cut.optimizer_stride} ranks apart do not fit a device matrix "
            f"{list(cut.devices)}"
        )
    if copied == [0] and used != sorted(used):
        # Here MindSpore's transform_checkpoints uses the order of the dimensions, not the one of the device matrix.
        raise ValueError(
            "optimizer parallelism cuts it, and its tensor map is not in the order of the device matrix"
        )
    return count, _number(places, cut.devices, copied) % count


def _runs(devices: Sequence[int], copied: Sequence[int], count: int) -> bool:
    """Return True if MindSpore can cut the copies along the axes ``copied`` of the device matrix into ``count`` parts.

    The parts must fill whole axes, from the last axis on, and divide the axis at which they end. If every axis has
    copies, ``count`` need only divide the number of ranks.
    """
    if len(copied) == len(devices):
        return math.prod(devices) % count == 0
    left = count
    for axis in reversed(copied):
        taken = math.gcd(left, devices[axis])
        if taken not in (left, devices[axis]):
            return False
        left //= taken
    return left == 1


def place(cut: Cut, slices: Mapping[int, Shape], first_rank: int = 0) -> PlacedSlices:
    """Return the shape of a tensor and the box of each part, from the slices that ranks of a stage hold.

    Args:
        cut: the cut of the tensor in the strategy file.
        slices: shape of each rank's slice, by rank within the stage. Ranks without a file are missing.
        first_rank: first rank of the stage, for messages.

    Raises:
        ValueError: the slices do not fit the strategy, or a part is missing.
    """
    dimensions = len(next(iter(slices.values())))
    for rank, shape in slices.items():
        if len(shape) != dimensions:
            raise ValueError(f"ranks {first_rank + min(slices)} and {first_rank + rank} differ in dimensions")
    division = divide(cut, dimensions)
    lengths = _lengths(cut, division, slices, first_rank)
    starts = [(0, *accumulate(sizes)) for sizes in lengths]
    holders: dict[tuple[int, ...], list[int]] = {}
    for rank, index in enumerate(division.part_of.tolist()):
        holders.setdefault(tuple(index), []).append(rank)
    shape = tuple(start[-1] for start in starts)
    if not is_shape(shape):
        raise ValueError(f"a tensor of shape {list(shape)}")
    found: dict[Box, tuple[int, ...]] = {}
    for index, ranks in holders.items():
        sizes = tuple(lengths[d][i] for d, i in enumerate(index))
        box = Box(tuple(starts[d][i] for d, i in enumerate(index)), sizes)
        there = tuple(rank for rank in ranks if rank in slices)
        if not there:
            raise ValueError(
                f"its part {box} is missing: no file of rank {ranges([first_rank + r for r in ranks])} has it"
            )
        for rank in there:
            if slices[rank] != sizes:
                raise ValueError(
                    f"the slice of rank {first_rank + rank} has the shape {list(slices[rank])}, and by the strategy "
                    f"and the other slices it is {list(sizes)}"
                )
        found[box] = there
    return PlacedSlices(shape, found)


def _lengths(
    cut: Cut, division: Division, slices: Mapping[int, Shape], first_rank: int
) -> list[tuple[int, ...]]:
    """Return, per dimension, the length of each part in elements."""
    some = slices[min(slices)]
    lengths = [(size,) * count for size, count in zip(some, division.parts, strict=True)]
    if cut.rows:
        lengths[0] = _rows(cut, division)
    elif (other := next((r for r, shape in slices.items() if shape != some), None)) is not None:
        raise ValueError(
            f"rank {first_rank + min(slices)} has a slice of {list(some)} and rank {first_rank + other} one of "
            f"{list(slices[other])}, and the strategy says nothing of uneven parts"
        )
    return lengths


def _rows(cut: Cut, division: Division) -> tuple[int, ...]:
    """Return the length of each part along dimension 0, from the lengths of all slices in the strategy file."""
    count = math.prod(division.parts)
    if cut.optimizer_parts or not cut.axes or len(cut.rows) != count:
        raise ValueError(f"the strategy gives {len(cut.rows)} lengths of uneven parts for {count} parts")
    table = np.array(cut.rows, np.int64).reshape(division.parts[0], -1)
    if (table != table[:, :1]).any():
        raise ValueError(f"the lengths {list(cut.rows)} of its uneven parts are no grid")
    return tuple(table[:, 0].tolist())
