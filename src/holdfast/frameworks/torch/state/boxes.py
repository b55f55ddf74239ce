"""The regions (boxes) of global tensors that this rank holds, and their bytes.

A plain tensor counts as a whole global tensor, with two exceptions. First, code may declare the tensor to be a region
of a larger one (:func:`declare`: Megatron's tensor-parallel weights, a flat optimizer shard). Second, the tensor may
have the attributes of DCP's ``CheckpointableTensor`` (torch 2.15: several regions, and padding, which is not saved).
A ``DTensor`` is split by its placements, in the order of the mesh dimensions. A strided placement (fully sharded on top
of tensor parallel) gives several regions. The regions are found by splitting an index range with the placement's own
code, so they are right for any placement. That takes 30 microseconds. A model has few combinations of shape, mesh and
placements, and the result for each combination is cached.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, TypeAlias

import torch
from torch.distributed.tensor import DTensor, Placement, Shard

from holdfast.errors import StateError
from holdfast.frameworks.torch import private_api
from holdfast.store.layouts.layout import Box
from holdfast.store.layouts.shardings import Cuts, cut

DTYPES: dict[torch.dtype, str] = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e8m0fnu: "F8_E8M0",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
    torch.uint16: "U16",
    torch.int16: "I16",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.uint32: "U32",
    torch.int32: "I32",
    torch.float32: "F32",
    torch.uint64: "U64",
    torch.int64: "I64",
    torch.float64: "F64",
    torch.complex64: "C64",
}
TORCH_DTYPES: dict[str, torch.dtype] = {name: dtype for dtype, name in DTYPES.items()}


FORMS_MAX = 4096

_Run: TypeAlias = tuple[int, int, int]
"""Consecutive elements of one dimension: start in the global tensor, start in the local tensor, number of elements."""


class _ShardForm(NamedTuple):
    """The properties of a ``DTensor`` that decide which regions this rank holds.

    The types are included because torch calls placements of different types equal.
    """

    shape: tuple[int, ...]
    placements: tuple[Placement, ...]
    types: tuple[type, ...]
    mesh: tuple[int, ...]
    coordinate: tuple[int, ...]


class LocalPart(NamedTuple):
    """A region of a tensor: ``box`` in the global tensor, ``where`` in this rank's local tensor."""

    box: Box
    where: tuple[slice, ...]


CHECKPOINTABLE = ("global_shape", "global_offsets", "local_offsets", "local_sizes")
"""Names of the attributes of a tensor that DCP of torch 2.15 saves as shards.

They hold the global shape, and three lists with one entry per shard: offsets in the global tensor, offsets in the local
tensor, sizes.
"""


class TensorRegion(NamedTuple):
    """The regions of a global tensor of ``shape`` that a plain tensor holds."""

    shape: tuple[int, ...]
    parts: tuple[LocalPart, ...]


def declare(tensor: torch.Tensor, shape: Sequence[int], offsets: Sequence[int]) -> None:
    """Declare this rank's plain ``tensor`` to be a region of a global tensor, before the session is made.

    Ranks that declare the same region hold copies of each other. Optimizer state of the tensor's shape has the same
    region. If an optimizer splits its state in another way, declare that state where the optimizer creates it.

    Args:
        tensor: a parameter, a buffer or a tensor of an optimizer's state, not a DTensor.
        shape: shape of the global tensor, in elements.
        offsets: start of ``tensor`` in the global tensor, in elements per dimension.

    Raises:
        StateError: the region does not lie inside ``shape``.
    """
    inside = len(shape) == tensor.ndim and _lies_in(tensor.shape, offsets, shape)
    if isinstance(tensor, DTensor) or not inside:
        raise StateError(
            f"declare(): a {type(tensor).__name__} of {list(tensor.shape)} at {list(offsets)} is no region of "
            f"{list(shape)}",
            hint="declare(tensor, shape=of the global tensor, offsets=where this rank's part begins)",
        )
    # Plain values, so that the script's own torch.save needs no class of Holdfast.
    shard = tuple(offsets), (0,) * tensor.ndim, tuple(tensor.shape)
    for name, value in zip(CHECKPOINTABLE, (tuple(shape), *([each] for each in shard)), strict=True):
        setattr(tensor, name, value)


def region_of(tensor: torch.Tensor) -> TensorRegion | None:
    """Return the region of a plain tensor, from the attributes of ``CheckpointableTensor``, which :func:`declare` sets.

    Returns:
        None if nothing is declared.

    Raises:
        StateError: the attributes name shards that lie outside of the local tensor or of the global tensor.
    """
    if isinstance(tensor, DTensor) or not all(hasattr(tensor, name) for name in CHECKPOINTABLE):
        return None
    shape, *shards = (getattr(tensor, name) for name in CHECKPOINTABLE)
    return _region(tuple(tensor.shape), tuple(shape), *(tuple(map(tuple, of_all)) for of_all in shards))


@functools.lru_cache(FORMS_MAX)
def _region(
    local: tuple[int, ...],
    shape: tuple[int, ...],
    offsets: tuple[tuple[int, ...], ...],
    places: tuple[tuple[int, ...], ...],
    sizes: tuple[tuple[int, ...], ...],
) -> TensorRegion:
    """Return the region that the attributes of a tensor describe. ``local``: the shape of the tensor itself.

    Raises: StateError.
    """
    sound = len(offsets) == len(places) == len(sizes) and all(
        len(shape) == len(size) == len(local)
        and _lies_in(size, offset, shape)
        and _lies_in(size, place, local)
        for offset, place, size in zip(offsets, places, sizes, strict=True)
    )
    boxes = [Box(offset, size) for offset, size in zip(offsets, sizes, strict=False)]
    if not sound or len(set(boxes)) < len(boxes):
        raise StateError(
            f"a tensor of {list(local)} says that it holds shards of {list(shape)} at {list(offsets)}, of the sizes "
            f"{list(sizes)}, which lie at {list(places)} in it: that cannot be",
            hint=f"correct its {', '.join(CHECKPOINTABLE)} (torch.distributed.checkpoint.CheckpointableTensor)",
        )
    parts = (
        LocalPart(box, tuple(slice(at, at + size) for at, size in zip(place, box.sizes, strict=True)))
        for box, place in zip(boxes, places, strict=True)
    )
    return TensorRegion(shape, tuple(parts))


def is_padded(tensor: torch.Tensor) -> bool:
    """Return True if some elements of the tensor lie in no declared region, so that no checkpoint holds them."""
    region = region_of(tensor)
    return region is not None and sum(part.box.numel for part in region.parts) < tensor.numel()


def _lies_in(sizes: Sequence[int], offsets: Sequence[int], whole: Sequence[int]) -> bool:
    return len(offsets) == len(whole) and all(
        0 <= at and 0 <= size and at + size <= most
        for at, size, most in zip(offsets, sizes, whole, strict=True)
    )


def refuse_undeclared(parameters: Mapping[str, torch.Tensor]) -> None:
    """Raise StateError for weights that Megatron split and that no code declared: each would be saved as if whole."""
    for fqn, parameter in parameters.items():
        if getattr(parameter, "tensor_model_parallel", False) and region_of(parameter) is None:
            raise StateError(
                f"{fqn} is one part of a tensor-parallel weight, and nothing says which",
                hint="holdfast.integrations.megatron.declare(model) before holdfast.session(...)",
            )


def global_shape(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return the shape of the global tensor of which ``tensor`` is a region; without a region, its own shape."""
    region = region_of(tensor)
    return tuple(tensor.shape) if region is None else region.shape


def placed(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return ``tensor``; if it has the shape of ``like``, declare it to have the same region."""
    if tensor is not like and tensor.shape == like.shape and region_of(like) is not None:
        for name in CHECKPOINTABLE:
            setattr(tensor, name, getattr(like, name))
    return tensor


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the local tensor of this rank, detached from autograd; it shares storage with ``tensor``."""
    return private_api.local_tensor(tensor).detach()


def writes_of(tensor: torch.Tensor) -> int:
    """Return torch's count of writes to a tensor; for a DTensor this includes writes to its local tensor."""
    return private_api.write_count(tensor)


class Mark:
    """A mark of the memory and write count of a tensor, which shows whether the tensor may have changed since.

    The mark keeps the memory alive, so no other tensor gets the same address. An assignment ``tensor.data = other``
    therefore always changes the address, and is noticed.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self._memory = local_of(tensor)
        self._writes = writes_of(tensor)

    def fits(self, tensor: torch.Tensor) -> bool:
        """Return True if the tensor still has this memory, and torch has counted no write since."""
        return local_of(tensor).data_ptr() == self._memory.data_ptr() and writes_of(tensor) == self._writes


def parts_of(tensor: torch.Tensor, name: str) -> list[LocalPart]:
    """Return the regions of ``tensor`` that this rank holds; none if the rank is outside of the tensor's mesh.

    Raises:
        StateError: the tensor has a pending reduction, or a placement that does not fit the shape of its local tensor.
    """
    if not isinstance(tensor, DTensor):
        try:
            region = region_of(tensor)
        except StateError as error:
            raise StateError(f"{name}: {error.message}", hint=error.hint) from error
        shape = tuple(tensor.shape)
        whole = (LocalPart(Box.whole(shape), tuple(slice(0, n) for n in shape)),)
        return list(whole if region is None else region.parts)
    if any(placement.is_partial() for placement in tensor.placements):
        raise StateError(
            f"{name}: a DTensor with a pending reduction ({tensor.placements}) cannot be saved",
            hint="redistribute it to Replicate() or Shard(dim) first",
        )
    form = _form_of(tensor)
    if form is None:
        return []
    runs, parts = _cut(form)
    held = private_api.local_tensor(tensor).shape
    for dim, dim_runs in enumerate(runs):
        if sum(size for _, _, size in dim_runs) != held[dim]:
            raise StateError(
                f"{name}: dimension {dim} holds {held[dim]} elements here, its placements "
                f"{tensor.placements} say {sum(size for _, _, size in dim_runs)}"
            )
    return list(parts)


def _form_of(tensor: DTensor) -> _ShardForm | None:
    """Return the properties that decide how the tensor is split; None on a rank outside of the tensor's mesh."""
    mesh, placements = tensor.device_mesh, tensor.placements
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return None
    return _ShardForm(
        tuple(tensor.shape), placements, tuple(map(type, placements)), tuple(mesh.shape), tuple(coordinate)
    )


@functools.lru_cache(FORMS_MAX)
def _cut(form: _ShardForm) -> tuple[tuple[tuple[_Run, ...], ...], tuple[LocalPart, ...]]:
    """Return this rank's runs of consecutive elements in each dimension, and the regions that the runs form."""
    runs = tuple(tuple(_runs(form, dim)) for dim in range(len(form.shape)))
    parts = tuple(
        LocalPart(
            Box(tuple(at for at, _, _ in combination), tuple(size for _, _, size in combination)),
            tuple(slice(start, start + size) for _, start, size in combination),
        )
        for combination in itertools.product(*runs)
    )
    return runs, parts


def _runs(form: _ShardForm, dim: int) -> list[_Run]:
    """Return this rank's runs of consecutive elements in one dimension."""
    index = None
    for mesh_dim, placement in enumerate(form.placements):
        if getattr(placement, "dim", None) != dim:
            continue
        if index is None:
            index = torch.arange(form.shape[dim])
        # Split a tensor that has size 1 in all other dimensions, so that only dimension `dim` matters.
        column = index.reshape([-1 if d == dim else 1 for d in range(len(form.shape))])
        cut = private_api.split_tensor(placement, column, form.mesh[mesh_dim])
        index = cut[form.coordinate[mesh_dim]].reshape(-1)
    if index is None:
        return [(0, 0, form.shape[dim])]
    if not index.numel():
        return [(0, 0, 0)]
    breaks = (torch.nonzero(index[1:] - index[:-1] != 1).flatten() + 1).tolist()
    edges = [0, *breaks, index.numel()]
    return [(int(index[a]), a, b - a) for a, b in itertools.pairwise(edges)]


def cuts_of(tensor: torch.Tensor, boxes: Sequence[Box]) -> Cuts | None:
    """Return this rank's cell of ``tensor``, a regularly sharded ``DTensor``.

    The result is None for any other tensor, and if this rank does not hold exactly one box.

    Args:
        boxes: the boxes of the tensor that this rank holds.
    """
    if not isinstance(tensor, DTensor) or len(boxes) != 1:
        return None
    form = _form_of(tensor)
    assert form is not None  # a rank outside of the mesh has no box
    return _regular(form, boxes[0])


@functools.lru_cache(FORMS_MAX)
def _regular(form: _ShardForm, box: Box) -> Cuts | None:
    """Return this rank's cell of the sharding, whose box is ``box``; None if the sharding is irregular."""
    cuts = []
    for dim in range(len(form.shape)):
        steps = [
            (form.mesh[mesh_dim], form.coordinate[mesh_dim])
            for mesh_dim, placement in enumerate(form.placements)
            if getattr(placement, "dim", None) == dim and form.mesh[mesh_dim] > 1
        ]
        if any(type(placement) is not Shard for placement in form.placements if not placement.is_replicate()):
            steps.reverse()  # a strided placement is applied after the ones that follow it
        offset, size = cut(form.shape[dim], steps)
        if size != box.sizes[dim] or (size and offset != box.offsets[dim]):
            return None
        cuts.append(tuple(steps))
    return tuple(cuts)


def overlaps(tensor: torch.Tensor) -> bool:
    """Return True if elements of the tensor share memory (``expand``), so that no value can be written into it."""
    strides = zip(tensor.shape, local_of(tensor).stride(), strict=True)
    return tensor.numel() > 0 and any(size > 1 and stride == 0 for size, stride in strides)


def lies_as(tensor: torch.Tensor, like: torch.Tensor) -> bool:
    """Return True if ``tensor`` can replace ``like``: both have the same shape, device and sharding.

    ``tensor`` must not require a gradient, and its elements must not share memory.
    """
    if tensor.shape != like.shape or tensor.device != like.device or tensor.requires_grad or overlaps(tensor):
        return False
    if isinstance(tensor, DTensor) or isinstance(like, DTensor):
        return (
            isinstance(tensor, DTensor)
            and isinstance(like, DTensor)
            and tensor.device_mesh == like.device_mesh
            and tensor.placements == like.placements
        )
    return tensor.layout is like.layout


def memory_order(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return the dimensions of a tensor on this rank, from the slowest to the fastest in memory.

    A tensor in C order has 0, 1, 2, ...
    """
    strides = local_of(tensor).stride()
    return tuple(sorted(range(len(strides)), key=lambda dimension: -strides[dimension]))


def flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a local tensor in C order, on its device: its own memory if possible, otherwise a copy.

    A conjugated or negated view is another tensor's memory with a flag, so its bytes are computed.
    """
    return _as_bytes(tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1))


@torch.no_grad()
def overwrite(tensors: Sequence[torch.Tensor], packed: torch.Tensor) -> None:
    """Overwrite local tensors with the bytes ``packed``: those of each tensor in C order, end to end, on its device."""
    for tensor, piece in zip(tensors, torch.split(packed, [t.nbytes for t in tensors]), strict=True):
        # A copy, because a piece may begin at an address that is not aligned for this dtype.
        tensor.copy_(piece.clone().view(tensor.dtype).reshape(tensor.shape))


def byte_view(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a local tensor in C order: its memory if contiguous and on the CPU, otherwise a copy."""
    own = own_bytes(tensor)
    return flat_bytes(tensor.detach().cpu()).numpy().data if own is None else own


def own_bytes(tensor: torch.Tensor) -> memoryview | None:
    """Return the memory of a local tensor if it holds the bytes in C order on the CPU; otherwise None."""
    return _as_bytes(tensor.detach().reshape(-1)).numpy().data if is_direct(tensor) else None


def _as_bytes(flat: torch.Tensor) -> torch.Tensor:
    """Return the memory of a contiguous one-dimensional tensor as bytes.

    A tensor of one element may have any stride, which is set to 1 here.
    """
    return (flat if flat.stride(0) == 1 else flat.as_strided(flat.shape, (1,))).view(torch.uint8)


def copy_bytes(tensor: torch.Tensor, start: int, stop: int, goal: memoryview) -> None:
    """Begin to copy bytes ``start`` to ``stop`` (in C order) of a local tensor, on any device, to ``goal``."""
    room, at = torch.frombuffer(goal, dtype=torch.uint8), 0
    for part in stretch(tensor, start, stop):
        room[at : at + len(part)].copy_(part, non_blocking=True)
        at += len(part)


def stretch(tensor: torch.Tensor, start: int, stop: int) -> Iterator[torch.Tensor]:
    """Yield bytes ``start`` to ``stop`` (in C order) of a local tensor, on its device, in one piece or several.

    A piece is the tensor's own memory if the tensor is in C order, otherwise a copy. Only the requested bytes are
    copied, rounded to whole elements.
    """
    size = tensor.element_size()
    first, last = start // size, -(-stop // size)
    at = first * size
    for block in _blocks(tensor.detach(), first, last):
        flat = flat_bytes(block)
        yield flat[max(start - at, 0) : stop - at]
        at += len(flat)


def _blocks(tensor: torch.Tensor, first: int, last: int) -> Iterator[torch.Tensor]:
    """Yield elements ``first`` to ``last`` (in C order) as views: whole rows together, parts of rows separately."""
    if first >= last:
        return
    if tensor.is_contiguous():
        yield tensor.reshape(-1)[first:last]
        return
    row = tensor[0].numel()
    low, high = -(-first // row), last // row
    if first < low * row:
        yield from _blocks(tensor[low - 1], first - (low - 1) * row, min(row, last - (low - 1) * row))
    if low < high:
        yield tensor[low:high]
    if low <= high and high * row < last:
        yield from _blocks(tensor[high], 0, last - high * row)


def is_direct(tensor: torch.Tensor) -> bool:
    """Return True if :func:`byte_view` shares memory with ``tensor``, so that a load can write into it."""
    return tensor.device.type == "cpu" and lies_in_order(tensor)


def lies_in_order(tensor: torch.Tensor) -> bool:
    """Return True if the memory of a local tensor holds its bytes in C order."""
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()
