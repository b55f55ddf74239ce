"""Layouts as data: which rank holds which box of which tensor.

Theory. A *box* is a rectangular region of a global tensor. Each rank declares the boxes that it holds
(:class:`RankLayout`); the :class:`Catalogue` joins the declarations of all ranks. Ranks with the same declaration
form one *layout class* (the replicas of a data-parallel group), so the catalogue grows with the number of distinct
boxes and not with the number of ranks. A rank may hold several boxes of one tensor (strided shards, flat ranges of
a ZeRO optimizer: see :func:`flat_range_boxes`).

Invariants:
1. Offsets and sizes are in elements, one number per dimension; a scalar has no dimension and exactly one element.
2. A box lies inside its tensor. A box without elements is dropped, unless the tensor itself has none: then its one box
   is the whole tensor.
3. One name has one dtype and one shape on every rank.
4. ``to_json`` is canonical: equal catalogues give equal bytes, whoever computes them; ``digest`` hashes those bytes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from itertools import pairwise

import msgspec
import xxhash

from holdfast.errors import StateError

CATALOGUE_VERSION = 1
FQN_LENGTH_MAX = 1024
DIMENSIONS_MAX = 32
TENSORS_MAX = 10_000_000
DTYPE_SIZE_BYTES: dict[str, int] = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "F8_E8M0": 1,
    "F8_E4M3FNUZ": 1,
    "F8_E5M2FNUZ": 1,
    "U16": 2,
    "I16": 2,
    "F16": 2,
    "BF16": 2,
    "U32": 4,
    "I32": 4,
    "F32": 4,
    "U64": 8,
    "I64": 8,
    "F64": 8,
    "C64": 8,
}
"""Element size per dtype name; the names are those of the safetensors format."""

Shape = tuple[int, ...]


class Box(msgspec.Struct, frozen=True, order=True, array_like=True):
    """A region of a tensor: ``offsets[d] <= index[d] < offsets[d] + sizes[d]`` in every dimension d (elements)."""

    offsets: Shape
    sizes: Shape

    @staticmethod
    def whole(shape: Sequence[int]) -> Box:
        """The box of a complete tensor."""
        return Box((0,) * len(shape), tuple(shape))

    @property
    def numel(self) -> int:
        """Number of elements (1 for a scalar)."""
        return math.prod(self.sizes)

    @property
    def ends(self) -> Shape:
        """First index after the box, per dimension."""
        return tuple(o + s for o, s in zip(self.offsets, self.sizes, strict=True))

    def intersect(self, other: Box) -> Box | None:
        """The common region, or None when it has no element."""
        offsets = tuple(map(max, self.offsets, other.offsets))
        sizes = tuple(map(lambda a, b, o: min(a, b) - o, self.ends, other.ends, offsets))
        return None if any(s <= 0 for s in sizes) else Box(offsets, sizes)

    def contains(self, other: Box) -> bool:
        """True when every element of ``other`` is in this box."""
        return all(
            a <= c and c + d <= a + b
            for a, b, c, d in zip(self.offsets, self.sizes, other.offsets, other.sizes, strict=True)
        )

    def __str__(self) -> str:
        inside = ", ".join(f"{o}:{o + s}" for o, s in zip(self.offsets, self.sizes, strict=True))
        return f"[{inside}]"


class TensorMeta(msgspec.Struct, frozen=True, order=True):
    """One box that a rank holds: ``shape`` is the global shape, ``dtype`` a key of :data:`DTYPE_SIZE_BYTES`."""

    fqn: str
    dtype: str
    shape: Shape
    box: Box

    @property
    def size_bytes(self) -> int:
        """Bytes of the box."""
        return self.box.numel * DTYPE_SIZE_BYTES[self.dtype]


class RankLayout(msgspec.Struct, frozen=True):
    """Everything that one rank of a ``world`` of ranks holds; several entries may share an fqn."""

    rank: int
    tensors: tuple[TensorMeta, ...]
    world: int

    def to_json(self) -> bytes:
        """Compact JSON, the payload of the ``LayoutPublished`` message."""
        return msgspec.json.encode(self)

    @staticmethod
    def from_json(data: bytes) -> RankLayout:
        """Inverse of :meth:`to_json`.

        Raises:
            StateError: not the JSON of a layout.
        """
        try:
            return msgspec.json.decode(data, type=RankLayout)
        except (msgspec.DecodeError, msgspec.ValidationError) as error:
            raise StateError(f"not a rank layout: {error}") from error


class BoxEntry(msgspec.Struct, frozen=True, array_like=True):
    """One distinct box and the layout classes (indices into ``Catalogue.classes``) that hold it."""

    offsets: Shape
    sizes: Shape
    classes: tuple[int, ...]

    @property
    def box(self) -> Box:
        """The region."""
        return Box(self.offsets, self.sizes)


class TensorEntry(msgspec.Struct, frozen=True):
    """One tensor of the job with all its distinct boxes, sorted."""

    fqn: str
    dtype: str
    shape: Shape
    boxes: tuple[BoxEntry, ...]

    @property
    def size_bytes(self) -> int:
        """Bytes of the complete tensor."""
        return math.prod(self.shape) * DTYPE_SIZE_BYTES[self.dtype]


class Catalogue(msgspec.Struct, frozen=True, dict=True):
    """All tensors of a job and who holds them. ``classes[c]`` are the ranks of layout class c, ascending."""

    version: int
    world: int
    classes: tuple[tuple[int, ...], ...]
    tensors: tuple[TensorEntry, ...]

    @staticmethod
    def from_layouts(layouts: Mapping[int, RankLayout]) -> Catalogue:
        """Join the declarations of the ranks (rank -> layout).

        Raises:
            StateError: a declaration breaks an invariant, or two ranks disagree about a tensor; names the tensor.
        """
        groups: dict[tuple[TensorMeta, ...], list[int]] = {}
        worlds = {layout.world for layout in layouts.values()}
        if len(worlds) != 1:
            raise StateError(f"the ranks disagree about the world size: {sorted(worlds)}")
        for rank, layout in sorted(layouts.items()):
            if rank != layout.rank or not 0 <= rank < layout.world:
                raise StateError(f"layout of rank {layout.rank} given as rank {rank} of {layout.world}")
            groups.setdefault(layout.tensors, []).append(rank)
        return _join(groups, worlds.pop())

    @staticmethod
    def from_encoded(layouts: Mapping[int, bytes]) -> Catalogue:
        """As :meth:`from_layouts`, from ``RankLayout.to_json`` bytes; decodes one layout of each class only.

        Raises:
            StateError: see :meth:`from_layouts`.
        """
        decoder = msgspec.json.Decoder(_RawLayout)
        seen: dict[tuple[int, bytes], RankLayout] = {}
        decoded: dict[int, RankLayout] = {}
        for rank, data in layouts.items():
            try:
                raw = decoder.decode(data)
            except msgspec.DecodeError as error:
                raise StateError(f"not a rank layout (rank {rank}): {error}") from error
            key = (raw.world, bytes(raw.tensors))
            if key not in seen:
                seen[key] = RankLayout.from_json(data)
            decoded[rank] = RankLayout(raw.rank, seen[key].tensors, raw.world)
        return Catalogue.from_layouts(decoded)

    @staticmethod
    def from_json(data: bytes) -> Catalogue:
        """Inverse of :meth:`to_json`; every invariant is checked again.

        Raises:
            StateError: names the broken rule.
        """
        try:
            catalogue = msgspec.json.decode(data, type=Catalogue)
        except (msgspec.DecodeError, msgspec.ValidationError) as error:
            raise StateError(f"not a catalogue: {error}") from error
        _check_catalogue(catalogue)
        if catalogue.to_json() != data:
            raise StateError("not a catalogue in canonical form (duplicate or unknown keys, or white space)")
        return catalogue

    def to_json(self) -> bytes:
        """Canonical JSON (see ``docs/format.md``)."""
        return msgspec.json.encode(self)

    @cached_property
    def digest(self) -> str:
        """xxh3-128 of :meth:`to_json`, 32 hex digits."""
        return xxhash.xxh3_128_hexdigest(self.to_json())

    @cached_property
    def by_fqn(self) -> dict[str, TensorEntry]:
        """Tensors by name."""
        return {tensor.fqn: tensor for tensor in self.tensors}

    @cached_property
    def ranks(self) -> frozenset[int]:
        """Ranks that declared a layout."""
        return frozenset(rank for members in self.classes for rank in members)

    @property
    def absent(self) -> tuple[int, ...]:
        """Ranks of the world that declared nothing: what they alone hold is unknown."""
        return tuple(rank for rank in range(self.world) if rank not in self.ranks)

    @property
    def size_bytes(self) -> int:
        """Bytes of all tensors, each counted once."""
        return sum(tensor.size_bytes for tensor in self.tensors)

    def holders(self, fqn: str, box: Box) -> tuple[int, ...]:
        """Ranks that declared exactly this box, ascending; empty when nobody did."""
        tensor = self.by_fqn.get(fqn)
        entries = tensor.boxes if tensor is not None else ()
        return next((self.members(e.classes) for e in entries if e.box == box), ())

    def members(self, classes: Sequence[int]) -> tuple[int, ...]:
        """Ranks of these layout classes, ascending."""
        if len(classes) == 1:
            return self.classes[classes[0]]
        return tuple(sorted(rank for c in classes for rank in self.classes[c]))

    def layout(self, rank: int) -> RankLayout:
        """What ``rank`` declared (order of entries normalised)."""
        own = {index for index, members in enumerate(self.classes) if rank in members}
        tensors = tuple(
            TensorMeta(t.fqn, t.dtype, t.shape, e.box)
            for t in self.tensors
            for e in t.boxes
            if not own.isdisjoint(e.classes)
        )
        return RankLayout(rank, tensors, self.world)


class _RawLayout(msgspec.Struct):
    """A layout whose tensors stay undecoded, to group equal ones cheaply."""

    rank: int
    tensors: msgspec.Raw
    world: int


def _join(groups: Mapping[tuple[TensorMeta, ...], Sequence[int]], world: int) -> Catalogue:
    """The catalogue of groups of ranks with equal declarations."""
    # Declarations that differ only in order or in empty boxes are the same class.
    normal: dict[frozenset[TensorMeta], list[int]] = {}
    for tensors, ranks in groups.items():
        normal.setdefault(frozenset(_normalised(tensors)), []).extend(ranks)
    classes = sorted(
        ((sorted(ranks), members) for members, ranks in normal.items()), key=lambda item: item[0]
    )
    meta: dict[str, tuple[str, Shape, int]] = {}
    boxes: dict[str, dict[Box, list[int]]] = {}
    for index, (ranks, members) in enumerate(classes):
        for tensor in members:
            known = meta.setdefault(tensor.fqn, (tensor.dtype, tensor.shape, ranks[0]))
            if known[:2] != (tensor.dtype, tensor.shape):
                raise StateError(
                    f"tensor {tensor.fqn!r}: rank {known[2]} declares {known[0]} {list(known[1])}, "
                    f"rank {ranks[0]} declares {tensor.dtype} {list(tensor.shape)}"
                )
            boxes.setdefault(tensor.fqn, {}).setdefault(tensor.box, []).append(index)
    tensors_out = tuple(
        TensorEntry(
            fqn,
            meta[fqn][0],
            meta[fqn][1],
            tuple(BoxEntry(b.offsets, b.sizes, tuple(sorted(c))) for b, c in sorted(boxes[fqn].items())),
        )
        for fqn in sorted(meta)
    )
    catalogue = Catalogue(CATALOGUE_VERSION, world, tuple(tuple(ranks) for ranks, _ in classes), tensors_out)
    _check_catalogue(catalogue)
    return catalogue


def _normalised(tensors: Iterable[TensorMeta]) -> Iterable[TensorMeta]:
    """Drop boxes without elements; an empty tensor keeps one box, the whole (invariant 2)."""
    for tensor in tensors:
        if tensor.dtype not in DTYPE_SIZE_BYTES:
            raise StateError(f"tensor {tensor.fqn!r}: unknown dtype {tensor.dtype!r}")
        if len(tensor.box.sizes) != len(tensor.shape) or len(tensor.box.offsets) != len(tensor.shape):
            raise StateError(
                f"tensor {tensor.fqn!r}: box {tensor.box} has not the dimensions of {list(tensor.shape)}"
            )
        if math.prod(tensor.shape) == 0:
            yield TensorMeta(tensor.fqn, tensor.dtype, tensor.shape, Box.whole(tensor.shape))
        elif tensor.box.numel != 0:
            yield tensor


def _check_catalogue(catalogue: Catalogue) -> None:
    """Refuse a catalogue that breaks an invariant."""
    if catalogue.version != CATALOGUE_VERSION:
        raise StateError(f"catalogue version {catalogue.version}, this reader knows {CATALOGUE_VERSION}")
    if len(catalogue.tensors) > TENSORS_MAX:
        raise StateError(f"catalogue of {len(catalogue.tensors)} tensors; the limit is {TENSORS_MAX}")
    ranks = [rank for members in catalogue.classes for rank in members]
    if len(set(ranks)) != len(ranks) or any(not 0 <= rank < catalogue.world for rank in ranks):
        raise StateError(f"catalogue: the layout classes do not partition ranks below {catalogue.world}")
    if any(not members or list(members) != sorted(members) for members in catalogue.classes):
        raise StateError("catalogue: a layout class is empty or not ascending")
    names = [tensor.fqn for tensor in catalogue.tensors]
    if any(a >= b for a, b in pairwise(names)):
        raise StateError("catalogue: tensors are not sorted by unique names")
    for tensor in catalogue.tensors:
        _check_tensor(tensor, len(catalogue.classes))


def _check_tensor(tensor: TensorEntry, classes: int) -> None:
    check_name(tensor.fqn)
    if tensor.dtype not in DTYPE_SIZE_BYTES:
        raise StateError(f"tensor {tensor.fqn!r}: unknown dtype {tensor.dtype!r}")
    if len(tensor.shape) > DIMENSIONS_MAX or any(not 0 <= n < 2**48 for n in tensor.shape):
        raise StateError(f"tensor {tensor.fqn!r}: impossible shape {list(tensor.shape)[:DIMENSIONS_MAX]}")
    if not tensor.boxes:
        raise StateError(f"tensor {tensor.fqn!r}: no box")
    whole, previous = Box.whole(tensor.shape), None
    for entry in tensor.boxes:
        box = entry.box
        if len(box.offsets) != len(tensor.shape) or len(box.sizes) != len(tensor.shape):
            raise StateError(
                f"tensor {tensor.fqn!r}: box {list(box.offsets)} has not {len(tensor.shape)} dimensions"
            )
        if any(s < 0 for s in box.sizes) or not whole.contains(box):
            raise StateError(f"tensor {tensor.fqn!r}: box {box} is outside {list(tensor.shape)}")
        if box.numel == 0 and box != whole:
            raise StateError(f"tensor {tensor.fqn!r}: box {box} has no element")
        if previous is not None and box <= previous:
            raise StateError(f"tensor {tensor.fqn!r}: boxes are not sorted and unique")
        if not entry.classes or any(not 0 <= c < classes for c in entry.classes):
            raise StateError(f"tensor {tensor.fqn!r}: box {box} names unknown layout classes")
        if any(a >= b for a, b in pairwise(entry.classes)):
            raise StateError(f"tensor {tensor.fqn!r}: classes of box {box} are not sorted and unique")
        previous = box


def check_name(fqn: str) -> None:
    """Refuse a name that cannot be a key of a safetensors file.

    Raises:
        StateError: empty, too long, reserved or with control characters.
    """
    if not 0 < len(fqn) <= FQN_LENGTH_MAX:
        raise StateError(f"tensor name of {len(fqn)} characters; allowed are 1 to {FQN_LENGTH_MAX}")
    if fqn == "__metadata__" or any(c < " " or c == "\x7f" for c in fqn):
        raise StateError(f"tensor name {fqn!r} is reserved or holds control characters")


def subtract(box: Box, covers: Iterable[Box]) -> list[Box]:
    """What of ``box`` none of ``covers`` covers, as disjoint boxes."""
    rest = [box] if box.numel else []
    for cover in covers:
        if not rest:
            break
        rest = [piece for part in rest for piece in _minus(part, cover)]
    return rest


def _minus(box: Box, cover: Box) -> list[Box]:
    """``box`` without ``cover``: at most two slabs per dimension."""
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
    """The flat (C-order) element range [start, stop) of an array of ``sizes`` as boxes, in flat order.

    At most ``2 * dimensions - 1`` boxes; each is itself one contiguous flat range. This is how to declare the shards
    of an optimizer that cuts flattened parameters (ZeRO, Megatron's distributed optimizer).

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
    """The flat (C-order) elements [start, stop) of a box as boxes in the coordinates of the box, in flat order."""
    return [
        Box(tuple(a + b for a, b in zip(part.offsets, box.offsets, strict=True)), part.sizes)
        for part in flat_range_boxes(box.sizes, start, stop)
    ]


def _prefixed(row: int, boxes: Iterable[Box]) -> list[Box]:
    return [Box((row, *box.offsets), (1, *box.sizes)) for box in boxes]
