"""NumPy arrays as training state that the store can save and load, without a deep-learning framework."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import xxhash
from numpy.typing import NDArray

from holdfast.errors import StateError
from holdfast.store.layouts.box import Extent
from holdfast.store.layouts.layout import Box, RankLayout, Shape, TensorMeta
from holdfast.store.read.load import LoadTarget
from holdfast.store.write.writer import TensorSource

DTYPE_NAMES: dict[str, str] = {
    "bool": "BOOL", "uint8": "U8", "int8": "I8", "uint16": "U16", "int16": "I16", "uint32": "U32", "int32": "I32",
    "uint64": "U64", "int64": "I64", "float16": "F16", "float32": "F32", "float64": "F64", "complex64": "C64",
    "bfloat16": "BF16", "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2", "float8_e8m0fnu": "F8_E8M0",
    "float8_e4m3fnuz": "F8_E4M3FNUZ", "float8_e5m2fnuz": "F8_E5M2FNUZ",
}  # fmt: skip
"""The store's dtype names by NumPy dtype name. The last six need the package ``ml_dtypes``."""

Array = NDArray[np.generic]
_KINDS = {name: kind for kind, name in DTYPE_NAMES.items()}


def dtype_named(name: str) -> np.dtype[np.generic] | None:
    """Return the NumPy dtype for a dtype name of the store; None if the installed NumPy has no such dtype."""
    try:
        return np.dtype(_KINDS[name])
    except (KeyError, TypeError):
        return None


@dataclass(frozen=True)
class Shard:
    """One box of a tensor: ``array`` has the box's data and sizes, ``shape`` is the shape of the whole tensor."""

    fqn: str
    shape: Shape
    box: Box
    array: Array


class NumpyState:
    """Boxes of tensors held in NumPy arrays, as a tensor source for saves and as targets for loads."""

    def __init__(self, shards: Iterable[Shard]) -> None:
        """Build the state from its shards. Several shards may belong to one tensor.

        Raises:
            StateError: an array is not C-contiguous, has an unsupported dtype or does not have its box's sizes.
        """
        self.shards = tuple(shards)
        for shard in self.shards:
            if shard.array.dtype.name not in DTYPE_NAMES or not shard.array.dtype.isnative:
                raise StateError(f"array {shard.fqn!r}: dtype {shard.array.dtype} cannot be saved")
            if shard.array.shape != shard.box.sizes or not shard.array.flags.c_contiguous:
                raise StateError(f"array {shard.fqn!r}: not a C-contiguous array of {list(shard.box.sizes)}")
        self._by_box = {(shard.fqn, shard.box): shard.array for shard in self.shards}

    @classmethod
    def whole(cls, arrays: Mapping[str, Array]) -> NumpyState:
        """Return the state of complete (replicated) tensors, given by name."""
        return cls(Shard(fqn, a.shape, Box.whole(a.shape), a) for fqn, a in arrays.items())

    def layout(self, rank: int, world: int) -> RankLayout:
        """Return the layout of these shards for ``rank`` of ``world`` ranks."""
        tensors = (TensorMeta(s.fqn, DTYPE_NAMES[s.array.dtype.name], s.shape, s.box) for s in self.shards)
        return RankLayout(rank, tuple(tensors), world)

    def view(self, fqn: str, box: Box) -> memoryview:
        """Return the bytes of one box of the layout (``TensorSource.view``).

        Raises:
            StateError: this state does not hold the box.
        """
        array = self._by_box.get((fqn, box))
        if array is None:
            raise StateError(f"tensor {fqn!r}: part {box} is not held here")
        return _bytes(array)

    def targets(self) -> list[LoadTarget]:
        """Return all shards as load targets. The arrays must be writable."""
        return [
            LoadTarget(s.fqn, s.box, DTYPE_NAMES[s.array.dtype.name], _bytes(s.array), s.shape)
            for s in self.shards
        ]


def metas_to_fill(shards: Iterable[Shard]) -> list[tuple[TensorMeta, memoryview]]:
    """Return the box of each shard with the writable bytes of its array: the result of ``Restore.buffers``."""
    return [(TensorMeta(t.fqn, t.dtype, t.shape, t.box), t.buffer) for t in NumpyState(shards).targets()]


def digests(source: TensorSource, layout: RankLayout) -> tuple[int, ...]:
    """Return one digest per box of the layout.

    The digests replace counts of writes for frameworks that do not count writes
    (``frameworks.common.optional_abilities.CountsWrites``).
    """
    return tuple(xxhash.xxh3_64_intdigest(source.view(meta.fqn, meta.box)) for meta in layout.tensors)


def digest_of(source: TensorSource, parts: Sequence[Extent]) -> int:
    """Return one xxh3-64 digest of the byte ranges ``parts``, in their order (for ``ComparesCopies.digest``)."""
    total = xxhash.xxh3_64()
    for part in parts:
        total.update(source.view(part.fqn, part.box)[part.start : part.stop])
    return total.intdigest()


def _bytes(array: Array) -> memoryview:
    """Return the array's memory as flat bytes."""
    return array.reshape(-1).view(np.uint8).data if array.size else memoryview(bytearray(0))
