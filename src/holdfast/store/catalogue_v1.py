"""Catalogues of format version 1, which listed every box of every tensor: read, never written."""

from __future__ import annotations

from itertools import pairwise

import msgspec

from holdfast.errors import StateError
from holdfast.store.layouts.box import Shape
from holdfast.store.layouts.shardings import BoxHolders

VERSION = 1


class BoxEntry(msgspec.Struct, frozen=True, array_like=True):
    """One distinct box and the layout classes (indices into ``Catalogue.classes``) that hold it."""

    offsets: Shape
    sizes: Shape
    classes: tuple[int, ...]


class TensorEntry(msgspec.Struct, frozen=True):
    """One tensor of the job with all its distinct boxes, sorted."""

    fqn: str
    dtype: str
    shape: Shape
    boxes: tuple[BoxEntry, ...]


class Catalogue(msgspec.Struct, frozen=True):
    """``classes[c]`` are the ranks that held exactly the same boxes, ascending."""

    version: int
    world: int
    classes: tuple[tuple[int, ...], ...]
    tensors: tuple[TensorEntry, ...]


def decode(data: bytes) -> Catalogue:
    """The old form; what the new form does not check by itself is checked here.

    Raises:
        StateError: names the broken rule.
        msgspec.DecodeError, msgspec.ValidationError: not of this form.
    """
    catalogue = msgspec.json.decode(data, type=Catalogue)
    if msgspec.json.encode(catalogue) != data:
        raise StateError("not a catalogue in canonical form (duplicate or unknown keys, or white space)")
    ranks = [rank for members in catalogue.classes for rank in members]
    if len(set(ranks)) != len(ranks) or any(not 0 <= rank < catalogue.world for rank in ranks):
        raise StateError(f"catalogue: the layout classes do not partition ranks below {catalogue.world}")
    if any(not members or list(members) != sorted(members) for members in catalogue.classes):
        raise StateError("catalogue: a layout class is empty or not ascending")
    if any(a.fqn >= b.fqn for a, b in pairwise(catalogue.tensors)):
        raise StateError("catalogue: tensors are not sorted by unique names")
    for tensor in catalogue.tensors:
        if not tensor.boxes:
            raise StateError(f"tensor {tensor.fqn!r}: no box")
        for entry in tensor.boxes:
            where = f"tensor {tensor.fqn!r}: box {list(entry.offsets)}"
            if not entry.classes or any(not 0 <= c < len(catalogue.classes) for c in entry.classes):
                raise StateError(f"{where} names unknown layout classes")
            if any(a >= b for a, b in pairwise(entry.classes)):
                raise StateError(f"{where}: its classes are not sorted and unique")
    return catalogue


def regions(catalogue: Catalogue, tensor: TensorEntry) -> tuple[BoxHolders, ...]:
    """The boxes of a tensor with the ranks that hold them."""
    return tuple(
        BoxHolders(
            entry.offsets,
            entry.sizes,
            tuple(sorted(rank for c in entry.classes for rank in catalogue.classes[c])),
        )
        for entry in tensor.boxes
    )


def absent(catalogue: Catalogue) -> tuple[int, ...]:
    """Ranks of the world that declared nothing."""
    there = {rank for members in catalogue.classes for rank in members}
    return tuple(rank for rank in range(catalogue.world) if rank not in there)
