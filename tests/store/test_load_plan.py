"""The extents that a load reads, and the places of their bytes: exactly the wanted parts, for any cuts."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from holdfast.store.format.manifest import BoxRecord
from holdfast.store.layouts.box import Box
from holdfast.store.read.load import _scatter
from holdfast.store.read.load_plan import LoadTarget, batches_of, in_order, reads_of
from holdfast.store.read.validation import StoredBox

Boxes = tuple[tuple[int, ...], Box, list[tuple[Box, Box]]]


@st.composite
def inside(draw: st.DrawFn, box: Box) -> Box:
    """Draw a box with elements inside another one."""
    offsets, sizes = [], []
    for offset, size in zip(box.offsets, box.sizes, strict=True):
        first = draw(st.integers(0, size - 1))
        offsets.append(offset + first)
        sizes.append(draw(st.integers(1, size - first)))
    return Box(tuple(offsets), tuple(sizes))


@st.composite
def cases(draw: st.DrawFn) -> Boxes:
    """Draw a shape, a stored box, and targets, each with the region that it wants of the box."""
    shape = tuple(draw(st.lists(st.integers(1, 6), max_size=4)))
    stored = draw(inside(Box.whole(shape)))
    pieces = []
    for _ in range(draw(st.integers(1, 3))):
        region = draw(inside(stored))
        low = tuple(draw(st.integers(0, o)) for o in region.offsets)
        high = tuple(draw(st.integers(e, n)) for e, n in zip(region.ends, shape, strict=True))
        pieces.append((Box(low, tuple(h - a for a, h in zip(low, high, strict=True))), region))
    return shape, stored, pieces


@given(cases(), st.integers(1, 40), st.integers(1, 5))
def test_every_wanted_element_comes_from_its_place(case: Boxes, each: int, batch: int) -> None:
    shape, box, pieces = case
    whole = np.arange(1, 1 + int(np.prod(shape, dtype=np.int64)), dtype=np.uint32).reshape(shape)

    def of(region: Box) -> tuple[slice, ...]:
        return tuple(slice(o, o + s) for o, s in zip(region.offsets, region.sizes, strict=True))

    data = memoryview(np.array(whole[of(box)], order="C").tobytes())
    digests = tuple("" for _ in range(0, box.numel, each))
    stored = StoredBox(
        0, "f", 4 * each, BoxRecord("t", "U32", shape, box.offsets, box.sizes, 0, 100, digests)
    )
    arrays = [np.zeros(target.sizes, np.uint32) for target, _ in pieces]
    wanted = [
        (LoadTarget("t", target, "U32", array.reshape(-1).view(np.uint8).data, shape), region)
        for (target, region), array in zip(pieces, arrays, strict=True)
    ]
    reads = reads_of(stored, wanted, batch * 4 * each)
    batches = batches_of(in_order(reads), batch * 4 * each)
    assert [read for found in batches for read in found] == in_order(reads)
    for read in reads:
        assert read.last - read.first <= batch
        some = data[read.start - 100 : read.start - 100 + read.size_bytes]
        if read.into is None:
            _scatter(read, some)
        else:
            read.into[:] = some
        for n in range(read.first, read.last):
            parts = read.cut(n, n + 1).parts()
            assert any(part.intersect(region) for part in parts for _, region in pieces), "no target wants it"
    for array, (target, region) in zip(arrays, pieces, strict=True):
        expected = np.zeros(target.sizes, np.uint32)
        at = tuple(o - t for o, t in zip(region.offsets, target.offsets, strict=True))
        expected[of(Box(at, region.sizes))] = whole[of(region)]
        assert (array == expected).all(), "what is wanted, and nothing else"
