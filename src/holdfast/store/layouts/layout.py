"""Layouts as data: the boxes of tensors that each rank holds.

Theory. A *box* is a rectangular region of a complete tensor. Each rank declares its boxes (:class:`RankLayout`), if
possible as cells, which are parts of a regular cut. The :class:`Catalogue` joins the declarations of all ranks into a
few grids (``shardings.py``). So a catalogue grows with ranks + tensors, not with ranks x tensors. A rank sends a table
of tensors, which is the same for most ranks, and the few boxes and cells that it holds. A row of the table has the name
of a tensor and a number, the ``place``, which refers to a box or cell in that list. A rank may hold several boxes of
one tensor (strided shards, flat ranges of a ZeRO optimizer: see :func:`flat_range_boxes`).

Invariants:
1. Offsets and sizes are in elements, one number per dimension; a scalar has no dimension and exactly one element.
2. A box lies inside its tensor. A tensor without elements has one box, the whole tensor. From other tensors, boxes
   without elements are dropped.
3. One name has one dtype and one shape on every rank.
4. ``to_json`` is canonical: equal catalogues give equal bytes on every rank. ``digest`` hashes those bytes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING

import msgspec
import xxhash

from holdfast.core.protocol.layout_messages import Layout
from holdfast.errors import StateError
from holdfast.store.layouts.box import DIMENSIONS_MAX, is_shape
from holdfast.store.layouts.box import Box as Box
from holdfast.store.layouts.box import Shape as Shape
from holdfast.store.layouts.box import flat_range_boxes as flat_range_boxes
from holdfast.store.layouts.box import flat_regions as flat_regions
from holdfast.store.layouts.box import subtract as subtract
from holdfast.store.layouts.shardings import (
    BoxHolders,
    Cell,
    Cuts,
    Grid,
    HeldBoxes,
    cut,
    whole_cuts,
)

if TYPE_CHECKING:
    from holdfast.store.layouts.shardings import Integers

CATALOGUE_VERSION = 2
FQN_LENGTH_MAX = 1024
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
"""Element size in bytes by dtype name; the names are those of the safetensors format."""


class TensorMeta(msgspec.Struct, frozen=True, order=True):
    """One box of a tensor that a rank holds. ``shape`` is the shape of the complete tensor.

    ``cuts`` is the cell (part of a regular cut) that equals the box; None if no such cell is known. Cells keep the
    catalogue small.
    """

    fqn: str
    dtype: str
    shape: Shape
    box: Box
    cuts: Cuts | None = None

    @property
    def size_bytes(self) -> int:
        """Size of the box in bytes."""
        return self.box.numel * DTYPE_SIZE_BYTES[self.dtype]


class Row(msgspec.Struct, frozen=True, array_like=True):
    """One row of the table of a :class:`Declaration`: a tensor, and the number ``place`` of its cell or box.

    A ``place`` n >= 0 is ``cells[n]`` of the declaration, n < 0 is ``boxes[-n - 1]``.
    """

    fqn: str
    dtype: str
    shape: Shape
    place: int


class Declaration(msgspec.Struct, frozen=True):
    """A rank's layout in the form of a message: the table ``tensors``, and the cells and boxes to which its rows refer.

    Ranks that cut the same tensors in the same way have the same table.
    """

    rank: int
    world: int
    cells: tuple[Cuts, ...]
    boxes: tuple[Box, ...]
    tensors: tuple[Row, ...]

    def box(self, row: Row) -> Box:
        """Return the box of the tensor in ``row`` that this rank holds."""
        if row.place < 0:
            return self.boxes[-row.place - 1]
        return cut_box(row.shape, self.cells[row.place])

    def check(self, places: Iterable[tuple[int, int]]) -> None:
        """Raise an error if a row refers to a missing cell or box, or to a cell with another number of dimensions.

        Args:
            places: pairs (``place`` of a row, number of dimensions of the row's tensor), from :func:`places_of`.

        Raises:
            StateError: the error names the ``place``.
        """
        for place, dimensions in places:
            if not -len(self.boxes) <= place < len(self.cells):
                raise StateError(f"not a rank layout (rank {self.rank}): its table names place {place}")
            if place >= 0 and len(self.cells[place]) != dimensions:
                raise StateError(
                    f"not a rank layout (rank {self.rank}): place {place} is of other dimensions"
                )


def places_of(rows: Iterable[Row]) -> set[tuple[int, int]]:
    """Return the distinct pairs (``place``, number of dimensions of the tensor) of the rows of a table."""
    return {(row.place, len(row.shape)) for row in rows}


class RankLayout(msgspec.Struct, frozen=True):
    """The layout of one rank: all its boxes, and the number of ranks (``world``). A tensor may have several boxes."""

    rank: int
    tensors: tuple[TensorMeta, ...]
    world: int

    def declaration(self) -> Declaration:
        """Return this layout in the form of a message. A box without elements is dropped, unless its tensor has none.

        Raises:
            StateError: a dtype is unknown, a box and its tensor differ in their number of dimensions, or a box differs
                from its cell (``cuts``).
        """
        cells: dict[Cuts, int] = {}
        boxes: dict[Box, int] = {}
        rows: list[Row] = []
        for tensor in self.tensors:
            cuts = _cuts_of(tensor)
            if cuts is not None:
                place = cells.setdefault(cuts, len(cells))
            elif tensor.box.numel:
                place = -1 - boxes.setdefault(tensor.box, len(boxes))
            else:
                continue
            rows.append(Row(tensor.fqn, tensor.dtype, tensor.shape, place))
        return Declaration(self.rank, self.world, tuple(cells), tuple(boxes), tuple(rows))

    def encode(self) -> Layout:
        """Return this layout as the two JSON texts of a ``LayoutPublished`` message, the table of tensors last."""
        said = self.declaration()
        own = _Own(said.rank, said.world, said.cells, said.boxes)
        return Layout(msgspec.json.encode(own), msgspec.json.encode(said.tensors))

    @staticmethod
    def decode(layout: Layout) -> RankLayout:
        """Return the layout that :meth:`encode` encoded.

        Raises:
            StateError: ``layout`` is not the JSON of a layout.
        """
        (declaration,) = declarations({0: layout}).values()
        declaration.check(places_of(declaration.tensors))
        return RankLayout(
            declaration.rank,
            tuple(
                TensorMeta(
                    row.fqn, row.dtype, row.shape, declaration.box(row),
                    declaration.cells[row.place] if row.place >= 0 and any(declaration.cells[row.place]) else None,
                )
                for row in declaration.tensors
            ),
            declaration.world,
        )  # fmt: skip


class TensorEntry(msgspec.Struct, frozen=True):
    """One tensor of the job. ``grid`` (index into ``Catalogue.grids``) gives its boxes and their holders."""

    fqn: str
    dtype: str
    shape: Shape
    grid: int

    @property
    def size_bytes(self) -> int:
        """Size of the complete tensor in bytes."""
        return math.prod(self.shape) * DTYPE_SIZE_BYTES[self.dtype]


class Catalogue(msgspec.Struct, frozen=True, dict=True):
    """All tensors of a job and their holders.

    ``absent`` are the ranks below ``world`` that declared no layout. Boxes that only these ranks hold are unknown.
    """

    version: int
    world: int
    absent: tuple[int, ...]
    grids: tuple[Grid, ...]
    tensors: tuple[TensorEntry, ...]

    @staticmethod
    def from_layouts(layouts: Mapping[int, RankLayout]) -> Catalogue:
        """Return the catalogue of the layouts of the ranks (by rank).

        Raises:
            StateError: a declaration breaks an invariant, or two ranks disagree about a tensor, which the error
                names.
        """
        return Catalogue.from_declarations({rank: layout.declaration() for rank, layout in layouts.items()})

    @staticmethod
    def from_encoded(layouts: Mapping[int, Layout]) -> Catalogue:
        """Return the catalogue of encoded layouts (by rank), as :meth:`RankLayout.encode` returns them.

        Raises:
            StateError: text that is not a layout, a broken invariant, or two ranks that disagree about a tensor.
        """
        return Catalogue.from_declarations(declarations(layouts))

    @staticmethod
    def from_declarations(declared: Mapping[int, Declaration]) -> Catalogue:
        """Return the catalogue of declarations (by rank). A table that several declarations share is read only once.

        Raises:
            StateError: a declaration breaks an invariant, or two ranks disagree about a tensor, which the error
                names.
        """
        worlds = {declaration.world for declaration in declared.values()}
        if len(worlds) != 1:
            raise StateError(f"the ranks disagree about the world size: {sorted(worlds)}")
        for rank, declaration in declared.items():
            if rank != declaration.rank or not 0 <= rank < declaration.world:
                raise StateError(
                    f"layout of rank {declaration.rank} given as rank {rank} of {declaration.world}"
                )
        world = worlds.pop()
        absent = tuple(rank for rank in range(world) if rank not in declared)
        return _numbered(world, absent, _Join(declared).tensors())

    @staticmethod
    def from_json(data: bytes) -> Catalogue:
        """Decode a catalogue from the result of :meth:`to_json`. Every invariant is checked again.

        Raises:
            StateError: the error names the broken rule.
        """
        try:
            version = msgspec.json.decode(data, type=_VersionedCatalogue).version
            if version != CATALOGUE_VERSION:
                raise StateError(f"catalogue version {version}, this reader knows {CATALOGUE_VERSION}")
            catalogue = msgspec.json.decode(data, type=Catalogue)
            _check_catalogue(catalogue)
            if msgspec.json.encode(catalogue) != data:
                raise StateError(
                    "not a catalogue in canonical form (duplicate or unknown keys, or white space)"
                )
        except (msgspec.DecodeError, msgspec.ValidationError, RecursionError) as error:
            raise StateError(f"not a catalogue: {error}") from error
        catalogue.__dict__["_json"] = data
        return catalogue

    def to_json(self) -> bytes:
        """Return canonical JSON (``docs/format.md``). For a decoded catalogue these are the bytes that were decoded."""
        return self._json

    @cached_property
    def _json(self) -> bytes:
        return msgspec.json.encode(self)

    @cached_property
    def digest(self) -> str:
        """The xxh3-128 digest of :meth:`to_json`, 32 hex digits."""
        return xxhash.xxh3_128_hexdigest(self.to_json())

    @cached_property
    def by_fqn(self) -> dict[str, TensorEntry]:
        """All tensors of the catalogue by name."""
        return {tensor.fqn: tensor for tensor in self.tensors}

    @cached_property
    def kinds(self) -> dict[tuple[int, Shape], list[TensorEntry]]:
        """The tensors by (index of the grid, shape). All tensors of one such pair have the same boxes.

        There are few pairs, however many tensors there are.
        """
        kinds: dict[tuple[int, Shape], list[TensorEntry]] = {}
        for tensor in self.tensors:
            kinds.setdefault((tensor.grid, tensor.shape), []).append(tensor)
        return kinds

    @cached_property
    def ranks(self) -> frozenset[int]:
        """The ranks that declared a layout."""
        return frozenset(range(self.world)).difference(self.absent)

    @property
    def size_bytes(self) -> int:
        """Total size of all tensors in bytes, each tensor counted once."""
        return sum(tensor.size_bytes for tensor in self.tensors)

    def boxes(self, tensor: TensorEntry) -> list[tuple[Box, tuple[int, ...]]]:
        """Return all distinct boxes of a tensor with the ranks that hold them, sorted by box."""
        import numpy as np

        grid = self.grids[tensor.grid]
        held = grid.on(tensor.shape)
        return _with_holders(grid, held, np.arange(len(held.entry)))

    def held_by(self, rank: int) -> list[tuple[TensorEntry, Box, tuple[int, ...]]]:
        """Return (tensor, box, all ranks that hold this box) for each box of ``rank``, sorted by tensor and box."""
        import numpy as np

        entries = [grid.entries_of(rank) for grid in self.grids]
        known: dict[tuple[int, Shape], list[tuple[Box, tuple[int, ...]]]] = {}
        for number, shape in self.kinds:
            if entries[number]:
                grid = self.grids[number]
                held = grid.on(shape)
                own = np.isin(held.entry, entries[number])
                own[[place for place, ranks in held.joined.items() if rank in ranks]] = True
                known[number, shape] = _with_holders(grid, held, np.nonzero(own)[0])
        return [
            (tensor, box, ranks)
            for tensor in self.tensors
            for box, ranks in known.get((tensor.grid, tensor.shape), ())
        ]


class _VersionedCatalogue(msgspec.Struct):
    version: int


class _Own(msgspec.Struct):
    """The first of the two JSON texts of a declaration. It has everything except the table of tensors."""

    rank: int
    world: int
    cells: tuple[Cuts, ...]
    boxes: tuple[Box, ...]


def declarations(layouts: Mapping[int, Layout]) -> dict[int, Declaration]:
    """Decode layouts (by rank) into declarations. Equal tables become one object.

    Raises:
        StateError: the text is not the JSON of a layout.
    """
    decoder = msgspec.json.Decoder(_Own)
    rows = msgspec.json.Decoder(tuple[Row, ...])
    tables: dict[bytes, tuple[Row, ...]] = {}
    decoded: dict[int, Declaration] = {}
    for rank, (own_part, table) in layouts.items():
        try:
            own = decoder.decode(own_part)
            if table not in tables:
                tables[table] = rows.decode(table)
        except (msgspec.DecodeError, msgspec.ValidationError) as error:
            raise StateError(f"not a rank layout (rank {rank}): {error}") from error
        decoded[rank] = Declaration(own.rank, own.world, own.cells, own.boxes, tables[table])
    return decoded


def cut_box(shape: Shape, cuts: Cuts) -> Box:
    """Return the box that a cell (a part of a regular cut) gives on a tensor of ``shape``."""
    parts = [cut(length, steps) for length, steps in zip(shape, cuts, strict=True)]
    return Box(tuple(offset for offset, _ in parts), tuple(size for _, size in parts))


def _cuts_of(tensor: TensorMeta) -> Cuts | None:
    """Return the cell (part of a regular cut) that equals a declared box; None if no such cell is known."""
    if tensor.dtype not in DTYPE_SIZE_BYTES:
        raise StateError(f"tensor {tensor.fqn!r}: unknown dtype {tensor.dtype!r}")
    if len(tensor.box.sizes) != len(tensor.shape) or len(tensor.box.offsets) != len(tensor.shape):
        raise StateError(
            f"tensor {tensor.fqn!r}: part {tensor.box} has not the dimensions of {list(tensor.shape)}"
        )
    if 0 in tensor.shape:
        return whole_cuts(len(tensor.shape))
    if tensor.cuts is None:
        return _even_cuts(tensor.shape, tensor.box)
    if len(tensor.cuts) != len(tensor.shape):
        raise StateError(f"tensor {tensor.fqn!r}: cuts of {len(tensor.cuts)} dimensions")
    box = cut_box(tensor.shape, tensor.cuts)
    if box != tensor.box and (box.numel or tensor.box.numel):
        raise StateError(f"tensor {tensor.fqn!r}: part {tensor.box} is not the part {box} of its cuts")
    return tensor.cuts


def _with_holders(grid: Grid, held: HeldBoxes, places: Integers) -> list[tuple[Box, tuple[int, ...]]]:
    """Return the boxes at the indices ``places`` with the ranks that hold them, sorted by box."""
    holders = grid.holders
    who = (
        held.joined.get(place, holders[entry])
        for place, entry in zip(places.tolist(), held.entry[places].tolist(), strict=True)
    )
    return sorted(zip(held.boxes(places), who, strict=True))


def _even_cuts(shape: Shape, box: Box) -> Cuts | None:
    """Return the cell of a box that is one part of a cut into equal parts; None for other boxes."""
    cuts: list[tuple[tuple[int, int], ...]] = []
    for length, offset, size in zip(shape, box.offsets, box.sizes, strict=True):
        if size <= 0 or length % size or offset % size or not 0 <= offset < length:
            return None  # whether the box lies inside the tensor is checked later
        cuts.append(() if size == length else ((length // size, offset // size),))
    return tuple(cuts)


class _Join:
    """The join of all ranks' declarations. Tensors share a grid if every rank has the same cells or boxes of them."""

    def __init__(self, declared: Mapping[int, Declaration]) -> None:
        self.tables: list[tuple[tuple[Row, ...], list[Declaration]]] = []
        numbers: dict[int, int] = {}
        known: dict[tuple[Row, ...], int] = {}
        for _, declaration in sorted(declared.items()):
            rows = declaration.tensors
            number = numbers.get(id(rows))
            if number is None:
                number = numbers[id(rows)] = known.setdefault(rows, len(self.tables))
                if number == len(self.tables):
                    self.tables.append((rows, []))
            self.tables[number][1].append(declaration)

    def tensors(self) -> dict[str, tuple[str, Shape, Grid]]:
        """Return dtype, shape and grid of each tensor, by name."""
        meta: dict[str, tuple[str, Shape, int]] = {}
        uses: dict[str, set[tuple[int, int]]] = {}
        for number, (rows, members) in enumerate(self.tables):
            places = places_of(rows)
            for declaration in members:
                declaration.check(places)
            for row in rows:
                kept = meta.setdefault(row.fqn, (row.dtype, row.shape, members[0].rank))
                if kept[:2] != (row.dtype, row.shape):
                    raise StateError(
                        f"tensor {row.fqn!r}: rank {kept[2]} declares {kept[0]} {list(kept[1])}, "
                        f"rank {members[0].rank} declares {row.dtype} {list(row.shape)}"
                    )
                uses.setdefault(row.fqn, set()).add((number, row.place))
        grids: dict[tuple[frozenset[tuple[int, int]], Shape], Grid] = {}
        out: dict[str, tuple[str, Shape, Grid]] = {}
        for fqn, (dtype, shape, _) in meta.items():
            listed = any(place < 0 for _, place in uses[fqn])
            key = (frozenset(uses[fqn]), shape if listed else ())
            if key not in grids:
                grids[key] = self._grid(key[0], shape if listed else None)
            out[fqn] = (dtype, shape, grids[key])
        return out

    def _grid(self, uses: frozenset[tuple[int, int]], shape: Shape | None) -> Grid:
        """Return the grid of a tensor. ``uses`` are all its rows, each as (index of the row's table, ``place``).

        If ``shape`` is None, the grid has cells. Otherwise it has boxes of a tensor of this shape.
        """
        if shape is None:
            cells: dict[Cuts, list[int]] = {}
            for number, place in uses:
                for declaration in self.tables[number][1]:
                    cells.setdefault(declaration.cells[place], []).append(declaration.rank)
            return Grid(tuple(Cell(cuts, _ascending(ranks)) for cuts, ranks in sorted(cells.items())), ())
        boxes: dict[Box, list[int]] = {}
        for number, place in uses:
            row = Row("", "", shape, place)
            for declaration in self.tables[number][1]:
                box = declaration.box(row)
                if box.numel:
                    boxes.setdefault(box, []).append(declaration.rank)
        return Grid(
            (), tuple(BoxHolders(b.offsets, b.sizes, _ascending(r)) for b, r in sorted(boxes.items()))
        )


def _ascending(ranks: Iterable[int]) -> tuple[int, ...]:
    return tuple(sorted(set(ranks)))


def _numbered(
    world: int, absent: tuple[int, ...], tensors: Mapping[str, tuple[str, Shape, Grid]]
) -> Catalogue:
    """Return the catalogue of ``tensors``, sorted by name, with each distinct grid once, in the order of first use."""
    numbers: dict[Grid, int] = {}
    same: dict[int, int] = {}  # a grid is large, so it is hashed once and not per tensor
    entries: list[TensorEntry] = []
    for fqn, (dtype, shape, grid) in sorted(tensors.items()):
        if id(grid) not in same:
            same[id(grid)] = numbers.setdefault(grid, len(numbers))
        entries.append(TensorEntry(fqn, dtype, shape, same[id(grid)]))
    catalogue = Catalogue(CATALOGUE_VERSION, world, absent, tuple(numbers), tuple(entries))
    _check_catalogue(catalogue)
    return catalogue


def _check_catalogue(catalogue: Catalogue) -> None:
    """Raise an error if the catalogue breaks an invariant."""
    if len(catalogue.tensors) > TENSORS_MAX:
        raise StateError(f"catalogue of {len(catalogue.tensors)} tensors; the limit is {TENSORS_MAX}")
    absent = catalogue.absent
    if any(a >= b for a, b in pairwise(absent)) or any(not 0 <= r < catalogue.world for r in absent):
        raise StateError("catalogue: the absent ranks are not ascending numbers below the world")
    for grid in catalogue.grids:
        grid.check(catalogue.world)
        if not grid.ranks.isdisjoint(absent):
            raise StateError("catalogue: an absent rank holds something")
    if any(a.fqn >= b.fqn for a, b in pairwise(catalogue.tensors)):
        raise StateError("catalogue: tensors are not sorted by unique names")
    used = 0
    places: set[tuple[int, Shape]] = set()
    for tensor in catalogue.tensors:
        check_tensor(tensor)
        if not 0 <= tensor.grid <= min(used, len(catalogue.grids) - 1):
            raise StateError(f"tensor {tensor.fqn!r}: grid {tensor.grid} is unknown or not the next one")
        used = max(used, tensor.grid + 1)
        if (tensor.grid, tensor.shape) not in places:
            places.add((tensor.grid, tensor.shape))
            _check_place(tensor, catalogue.grids[tensor.grid])
    if used != len(catalogue.grids):
        raise StateError("catalogue: a grid has no tensor")


def check_tensor(tensor: TensorEntry | TensorMeta) -> None:
    """Raise an error if no checkpoint can hold this tensor.

    Raises:
        StateError: its name, its dtype or its shape is not allowed.
    """
    check_name(tensor.fqn)
    if tensor.dtype not in DTYPE_SIZE_BYTES:
        raise StateError(f"tensor {tensor.fqn!r}: unknown dtype {tensor.dtype!r}")
    if not is_shape(tensor.shape):
        raise StateError(f"tensor {tensor.fqn!r}: impossible shape {list(tensor.shape)[:DIMENSIONS_MAX]}")


def _check_place(tensor: TensorEntry, grid: Grid) -> None:
    """Raise an error if a grid does not fit the shape of one of its tensors."""
    whole = Box.whole(tensor.shape)
    if grid.cells and len(grid.cells[0].cuts) != len(tensor.shape):
        raise StateError(f"tensor {tensor.fqn!r}: its cells have not {len(tensor.shape)} dimensions")
    for region in grid.boxes:
        box = Box(region.offsets, region.sizes)
        if len(box.offsets) != len(tensor.shape) or len(box.sizes) != len(tensor.shape):
            raise StateError(
                f"tensor {tensor.fqn!r}: part {list(box.offsets)} has not {len(tensor.shape)} dimensions"
            )
        if any(s < 0 for s in box.sizes) or not whole.contains(box):
            raise StateError(f"tensor {tensor.fqn!r}: part {box} is outside {list(tensor.shape)}")
        if box.numel == 0 and box != whole:
            raise StateError(f"tensor {tensor.fqn!r}: part {box} has no element")


def check_name(fqn: str) -> None:
    """Raise an error if the name of a tensor cannot be a key of a safetensors file.

    Raises:
        StateError: the name is empty, too long, reserved, not valid Unicode, or has control characters.
    """
    if not 0 < len(fqn) <= FQN_LENGTH_MAX:
        raise StateError(
            f"tensor name of {len(fqn)} characters ({fqn[:60]!r}); allowed are 1 to {FQN_LENGTH_MAX}",
            hint="shorten the keys that lead to it",
        )
    if fqn == "__metadata__" or any(c < " " or c == "\x7f" for c in fqn):
        raise StateError(f"tensor name {fqn!r} is reserved or holds control characters")
    if any("\ud800" <= c <= "\udfff" for c in fqn):
        raise StateError(f"tensor name {fqn!r} is no valid Unicode")
