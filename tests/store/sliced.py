"""Sliced checkpoints in MindSpore's format, made without it: strategy files, ``.ckpt`` files, slices of each rank."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from holdfast.store.mindspore.protobuf import counted, tagged
from holdfast.store.mindspore.slice_file import TYPES

Array = NDArray[Any]
_TYPE_OF = {"bool": "Bool", "int32": "Int32", "int64": "Int64", "float32": "Float32", "uint16": "UInt16"}


class Told(NamedTuple):
    """The entry of a strategy file for a parameter. In a tensor map of lists, several axes cut a dimension."""

    devices: list[int]
    tensor_map: Sequence[int | list[int]]
    rows: Sequence[int] = ()
    step: int = 0
    size: int = 0
    field: int = 0

    def layout(self) -> bytes:
        """Return the entry as a ``ParallelLayouts``."""
        nested = any(isinstance(entry, list) for entry in self.tensor_map)
        maps = [e if isinstance(e, list) else [e] for e in self.tensor_map] if nested else [self.tensor_map]
        return b"".join(
            [
                tagged(1, _dims(self.devices)),
                *(tagged(2, _dims(numbers)) for numbers in maps),  # type: ignore[arg-type]
                tagged(3, _dims(self.rows)),
                tagged(4, b""),
                counted(5, self.field),
                counted(6, self.step),
                counted(7, self.size),
            ]
        )


def _dims(numbers: Sequence[int]) -> bytes:
    return b"".join(counted(1, number) for number in numbers)


def strategy_bytes(told: Mapping[str, Told], stage: int = 0) -> bytes:
    """Return a ``ParallelStrategyMap``, as a rank of ``stage`` writes it."""
    operator = tagged(1, b"MatMul-op0") + tagged(2, counted(1, stage) + tagged(2, _dims([1, 1])))
    items = [tagged(3, tagged(1, name.encode()) + tagged(2, one.layout())) for name, one in told.items()]
    return counted(1, stage) + tagged(2, operator) + b"".join(items)


def strategy_json(told: Mapping[str, Told], stage: int = 0) -> bytes:
    """Return the same strategy as JSON."""
    layouts = {
        name: {
            "dev_matrix": one.devices,
            "field": one.field,
            "opt_weight_shard_size": one.size,
            "opt_weight_shard_step": one.step,
            "param_split_shape": list(one.rows),
            "tensor_map": list(one.tensor_map),
        }
        for name, one in told.items()
    }
    operators = {"MatMul-op0": {"stage": stage, "parallel_strategy": [[1, 1]]}}
    return json.dumps(
        {"current_stage": stage, "parallel_strategy_item": operators, "parallel_layout_item": layouts}
    ).encode()


def ckpt_bytes(tensors: Mapping[str, Array], pieces: int = 1) -> bytes:
    """Return a ``.ckpt`` file. Each tensor is stored in ``pieces`` values."""
    found = []
    for name, array in tensors.items():
        dims = array.shape or (0,)
        data, item = array.tobytes(), array.itemsize
        step = max(1, -(-array.size // pieces)) * item
        kind = _TYPE_OF[array.dtype.name]
        assert kind in TYPES
        for at in range(0, max(len(data), 1), step):
            tensor = _dims(dims) + tagged(2, kind.encode()) + tagged(3, data[at : at + step])
            found.append(tagged(1, tagged(1, name.encode()) + tagged(2, tensor)))
    return b"".join(found)


def slice_of(whole: Array, told: Told, rank: int) -> Array:
    """Return the slice of a rank, computed from the definition one coordinate at a time."""
    place: list[int] = []
    rest = rank
    for size in reversed(told.devices):
        place.insert(0, rest % size)
        rest //= size
    part = whole
    used: set[int] = set()
    for dimension, entry in enumerate(told.tensor_map):
        for k in entry if isinstance(entry, list) else [entry]:
            if k < 0:
                continue
            axis = len(told.devices) - 1 - k
            used.add(axis)
            if dimension == 0 and told.rows:
                starts = np.cumsum([0, *told.rows])
                part = part[starts[place[axis]] : starts[place[axis] + 1]]
            else:
                part = np.split(part, told.devices[axis], dimension)[place[axis]]
    if told.size:
        copied = [a for a in range(len(told.devices)) if a not in used]
        copies = math.prod(told.devices[a] for a in copied)
        number = 0
        for axis in copied:
            number = number * told.devices[axis] + place[axis]
        count = copies if told.size < 0 else told.size
        part = np.split(part, count, 0)[number % count]
    return np.ascontiguousarray(part)


def write_slices(
    folder: Path,
    wholes: Mapping[str, Array],
    told: Mapping[str, Told],
    *,
    stage: int = 0,
    name: str = "m.ckpt",
    pieces: int = 1,
) -> None:
    """Write ``rank_N/<name>`` of each rank of a stage. Parameters that ``told`` lacks are whole on each rank."""
    count = math.prod(next(iter(told.values())).devices)
    for local in range(count):
        own = folder / f"rank_{stage * count + local}"
        own.mkdir(parents=True, exist_ok=True)
        tensors = {n: slice_of(a, told[n], local) if n in told else a for n, a in wholes.items()}
        (own / name).write_bytes(ckpt_bytes(tensors, pieces))
