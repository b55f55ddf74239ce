"""The conversion of checkpoints to and from MindSpore's own files, for use with MindSpore's tools.

Theory. MindSpore describes slices by a *device matrix* and a *tensor map*. The device matrix is the grid of the ranks,
row by row. The tensor map gives for each dimension the axis of the grid that cuts it, counted from the right; -1 if no
axis cuts it. Holdfast's catalogue holds the box of every rank, and both descriptions follow from the boxes. A dimension
may be cut into n equal parts, with part (rank // stride) % n on each rank: then the axis of size n and this stride cuts
it. Any other layout (uneven parts, no grid) has no such description and is refused by name.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence, Set
from math import prod
from pathlib import Path
from typing import Any, Literal

import mindspore as ms
import numpy as np
from mindspore.train.node_strategy_pb2 import ParallelStrategyMap
from numpy.typing import NDArray

from holdfast.errors import CheckpointInvalid, StateError, UsageError
from holdfast.frameworks.common.imported_checkpoint import write_imported
from holdfast.frameworks.common.numpy_state import dtype_named
from holdfast.frameworks.common.weight_selection import joined_values, tensors_of
from holdfast.frameworks.mindspore.sliced_checkpoints import NAMED, OPTIMIZER, STEP_NAMES, Slices, read_slices
from holdfast.frameworks.mindspore.state import MindSporeState
from holdfast.store.backends.location import Place, place_of
from holdfast.store.layouts.layout import Box, Catalogue, TensorEntry
from holdfast.store.manage.checkpoint_root import resolve
from holdfast.store.mindspore.group_info import GroupInfo, encode_group_info
from holdfast.store.read.load import LoadTarget, Opened, load_into, opened

log = logging.getLogger("holdfast")

Format = Literal["ckpt", "safetensors"]


def export_checkpoint(
    path: str | os.PathLike[str],
    folder: str | os.PathLike[str],
    *,
    name: str = "checkpoint",
    form: Format = "ckpt",
) -> list[Path]:
    """Write a Holdfast checkpoint in MindSpore's format, with a strategy file and group info for each rank.

    Args:
        path: a checkpoint, a directory of checkpoints, or ``DIRECTORY@STEP``.
        folder: directory for ``rank_N/<name>.<form>``, ``strategy/src_strategy_N.ckpt`` and ``rank_N/group_info.pb``.
        name: name of the ranks' files.
        form: ``ckpt`` or ``safetensors``.

    Returns:
        The ranks' files, by rank. ``transform_checkpoints``, ``load_distributed_checkpoint``,
        ``get_ckpt_path_with_strategy`` and ``restore_group_info_list`` work on them.

    Raises:
        UsageError, NothingToResume: there is no such checkpoint.
        CheckpointInvalid: the checkpoint is damaged.
        StateError: MindSpore's strategy files cannot describe the layout.
    """
    with opened(resolve(path)) as source:
        return _export(source, Path(folder), name, form)


def _export(source: Opened, target: Path, name: str, form: Format) -> list[Path]:
    catalogue = source.index.catalogue
    users = tensors_of({"state": joined_values(source).get("state")})  # left out: they are no parameters
    held = {rank: _boxes_of(catalogue, rank, users) for rank in range(catalogue.world)}
    strategy = _strategy([t for t in catalogue.tensors if t.fqn not in users], held)
    written = []
    for rank, boxes in held.items():
        own = target / f"rank_{rank}"
        own.mkdir(parents=True, exist_ok=True)
        (target / "strategy").mkdir(exist_ok=True)
        (target / "strategy" / f"src_strategy_{rank}.ckpt").write_bytes(strategy)
        (own / "group_info.pb").write_bytes(_group_info(held, rank))
        arrays = _read(source, boxes)
        tensors = [
            {"name": fqn.removeprefix(OPTIMIZER), "data": ms.Tensor(array)} for fqn, array in arrays.items()
        ]
        file = own / f"{name}.{form}"
        ms.save_checkpoint(tensors, str(file), format=form)
        written.append(file)
    return written


def import_checkpoint(
    file: str | os.PathLike[str],
    cell: Any,
    root: Place | str | os.PathLike[str],
    *,
    step: int | None = None,
    strategy: str | os.PathLike[str] | None = None,
) -> Place:
    """Write a ``.ckpt`` or ``.safetensors`` file of MindSpore as a verified checkpoint that a session can resume from.

    Args:
        file: a file with all parameters of ``cell``. With ``strategy``: the directory with ``rank_N/*.ckpt`` of a
            parallel training, which hold the parameters in slices.
        cell: the training cell (network and optimizer) with whole parameters, which are set to the loaded values.
        root: directory of checkpoints, as a session's ``checkpoint=``.
        step: number of updates done; None means the file's ``global_step``, or its ``step_num``.
        strategy: the strategy file of that training, the merged file of all its stages, or the directory of all files.

    Returns:
        The place of the new checkpoint.

    Raises:
        UsageError: the file does not exist, or has no step.
        CheckpointInvalid: the file cannot be read, slices are missing or contradict each other, or parameters of the
            cell are missing.
        StoreWriteError: ``root`` cannot be written.

    Example:
        ``import_checkpoint("output/", cell, "ckpts/", strategy="strategy/merged.ckpt")``
    """
    source, place = Path(file), place_of(root)
    if strategy is None:
        loaded = _load(source)
        told = _step_in(loaded)
    else:
        slices = read_slices(source, Path(strategy), log.info)
        loaded, told = _parameters(slices), slices.step
    try:
        missing, _ = ms.load_param_into_net(cell, loaded)
    except RuntimeError as error:  # another shape or type
        raise CheckpointInvalid(
            f"{source} does not fit the cell: {' '.join(str(error).split())[:200]}"
        ) from error
    if missing:
        raise CheckpointInvalid(f"{source} lacks parameters of the cell: {', '.join(missing[:NAMED])}")
    done = told if step is None else step
    if done is None:
        raise UsageError(f"{source} does not say its step", hint="import_checkpoint(..., step=N)")
    state = MindSporeState(cell, cell.optimizer, {}, {}, copy_all=False)
    collected = state.collect(frozen=False)
    return write_imported(place, done, collected, collected.values)


def _parameters(slices: Slices) -> dict[str, Any]:
    """Return the tensors merged from slices as MindSpore parameters, by name."""
    found: dict[str, Any] = {}
    for name, tensor in slices.tensors.items():
        if (dtype := dtype_named(tensor.dtype)) is None:
            raise StateError(f"tensor {name!r}: type {tensor.dtype} cannot be loaded into a cell here")
        found[name] = ms.Parameter(ms.Tensor(tensor.bits().view(dtype)), name=name)
    return found


def _load(source: Path) -> Mapping[str, Any]:
    """Return the parameters in one file of MindSpore, by name."""
    if not source.is_file():
        raise UsageError(f"there is no file {source}", hint="give MindSpore's .ckpt or .safetensors file")
    form = "safetensors" if source.suffix == ".safetensors" else "ckpt"
    try:
        return dict(ms.load_checkpoint(str(source), format=form))
    except (ValueError, RuntimeError) as error:
        raise CheckpointInvalid(
            f"{source}: MindSpore cannot read it: {' '.join(str(error).split())[:200]}"
        ) from error


def _step_in(loaded: Mapping[str, Any]) -> int | None:
    for name in STEP_NAMES:
        if name in loaded:
            return int(np.asarray(loaded[name].asnumpy()).reshape(-1)[0])
    return None


def _boxes_of(catalogue: Catalogue, rank: int, users: Set[str]) -> dict[str, Box]:
    """Return the box that a rank holds of each tensor, without the tensors of the user's own state."""
    boxes: dict[str, Box] = {}
    for tensor, box, _ in catalogue.held_by(rank):
        if tensor.fqn in users:
            continue
        if tensor.fqn in boxes:
            raise StateError(
                f"tensor {tensor.fqn!r}: rank {rank} holds several parts, MindSpore's files hold one"
            )
        boxes[tensor.fqn] = box
    return boxes


def _read(source: Opened, boxes: Mapping[str, Box]) -> dict[str, NDArray[Any]]:
    """Return the contents of one rank's boxes, read from the checkpoint and verified, by tensor name."""
    catalogue = source.index.catalogue
    arrays: dict[str, NDArray[Any]] = {}
    targets = []
    for tensor in catalogue.tensors:
        if tensor.fqn not in boxes:
            continue
        if (dtype := dtype_named(tensor.dtype)) is None:
            raise StateError(f"tensor {tensor.fqn!r}: type {tensor.dtype} cannot be exported")
        box = boxes[tensor.fqn]
        array = arrays[tensor.fqn] = np.empty(box.sizes, dtype)
        data = array.reshape(-1).view(np.uint8).data if array.size else memoryview(bytearray(0))
        targets.append(LoadTarget(tensor.fqn, box, tensor.dtype, data, tensor.shape))
    load_into(source, targets, known=[t.fqn for t in catalogue.tensors if t.fqn not in arrays])
    return arrays


# ---------------------------------------------------------------- strategy files


def _strategy(tensors: Sequence[TensorEntry], held: Mapping[int, Mapping[str, Box]]) -> bytes:
    """Return MindSpore's ParallelStrategyMap, encoded, for all tensors except scalars.

    MindSpore can read no scalars from a strategy file.
    """
    message = ParallelStrategyMap()
    message.current_stage = 0
    for tensor in (each for each in tensors if each.shape):
        if not all(tensor.fqn in boxes for boxes in held.values()):
            raise StateError(
                f"tensor {tensor.fqn!r} is not on every rank: MindSpore describes that by pipeline stages"
            )
        matrix, mapping = describe(tensor, [held[rank][tensor.fqn] for rank in range(len(held))])
        item = message.parallel_layout_item.add()
        item.param_name = tensor.fqn.removeprefix(OPTIMIZER)
        layout = item.parallel_layouts
        layout.dev_matrix.add().dim.extend(matrix)
        layout.tensor_map.add().dim.extend(mapping)
        # These two fields, present and empty, mean even slices. Without them load_distributed_checkpoint fails.
        layout.param_split_shape.add()
        layout.indices_offset.add()
        layout.field = 0
        layout.opt_weight_shard_step, layout.opt_weight_shard_size = 0, 0
    # merge_pipeline_strategys treats a file without any operator as empty.
    operator = message.parallel_strategy_item.add()
    operator.node_name = "holdfast"
    operator.parallel_strategys.stage = 0
    operator.parallel_strategys.parallel_strategy.add().dim.extend([1])
    return bytes(message.SerializeToString())


def describe(tensor: TensorEntry, boxes: list[Box]) -> tuple[list[int], list[int]]:
    """Return device matrix and tensor map (see the module docstring) of a tensor whose box on rank r is ``boxes[r]``.

    Raises:
        StateError: the boxes do not form an even grid over the ranks.
    """
    world, sizes = len(boxes), boxes[0].sizes
    refused = StateError(
        f"tensor {tensor.fqn!r}: its parts are no even grid over the ranks, which MindSpore needs"
    )
    if not tensor.shape or any(box.sizes != sizes for box in boxes):
        if all(box == Box.whole(tensor.shape) for box in boxes):
            return [world], []
        raise refused
    cuts: list[tuple[int, int, int]] = []  # stride over the ranks, parts, dimension
    for dimension, (size, whole) in enumerate(zip(sizes, tensor.shape, strict=True)):
        parts = whole // size if size else 1
        if parts == 1 and size == whole:
            continue
        places = [box.offsets[dimension] // size for box in boxes]
        if whole % size or 1 not in places:
            raise refused
        stride = places.index(1)
        if any(place != rank // stride % parts for rank, place in enumerate(places)):
            raise refused
        cuts.append((stride, parts, dimension))
    matrix: list[int] = []
    axis_of: dict[int, int] = {}
    span = world
    for stride, parts, dimension in sorted(cuts, reverse=True):
        if span % (stride * parts):
            raise refused
        if span > stride * parts:
            matrix.append(span // (stride * parts))
        axis_of[dimension] = len(matrix)
        matrix.append(parts)
        span = stride
    if span > 1 or not matrix:
        matrix.append(span)
    assert prod(matrix) == world
    mapping = [len(matrix) - 1 - axis_of[d] if d in axis_of else -1 for d in range(len(sizes))]
    return matrix, mapping


def _group_info(held: Mapping[int, Mapping[str, Box]], rank: int) -> bytes:
    """Return the encoded list of the ranks that hold the same slices as ``rank``."""
    same = tuple(other for other, boxes in held.items() if boxes == held[rank])
    return encode_group_info(GroupInfo({"holders": same}, same))
