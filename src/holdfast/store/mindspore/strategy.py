"""MindSpore's strategy files: how the ranks of a parallel training cut each parameter.

Theory. MindSpore's option ``strategy_ckpt_save_file`` writes one file per rank, protobuf (``ParallelStrategyMap``) or
JSON, with the parameters of that rank's pipeline stage. The function ``merge_pipeline_strategys`` joins these files
into one, in which a name begins with the stage (``1-decoder.weight``). For a parameter a file has:

- a *device matrix*: the ranks of its stage as a grid, row by row;
- a *tensor map*: for each dimension, the axis of the device matrix that cuts it, counted from the right; -1 if no axis
  cuts it. If several axes cut a dimension, the first is the outermost;
- for uneven parts, the number of rows of each part;
- for optimizer parallelism, the number of parts into which the ranks with copies cut the first dimension.

``slices.py`` computes the position of a slice.

Invariants:
1. A device matrix has at least one rank and at most ``RANKS_MAX``. No axis cuts a parameter twice.
2. All parameters of a stage are cut over the same number of ranks.
3. Damaged bytes raise :class:`CheckpointInvalid`. The sizes and numbers of the read files, and the numbers in a file,
   are limited.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec

from holdfast.errors import CheckpointInvalid, UsageError
from holdfast.store.backends.user_files import read_given
from holdfast.store.layouts.box import DIMENSIONS_MAX, LENGTH_MAX
from holdfast.store.mindspore.protobuf import Value, fields, integer, message, repeated, text

FILE_SIZE_BYTES_MAX = 64 * 1024 * 1024
FILES_MAX = 100_000
RANKS_MAX = 2**20
STAGE_MAX = 2**16
NUMBERS_MAX = 2**22
"""Largest count of numbers in the lists of one file. One byte in the file becomes an object of at least eight bytes."""
WHOLE_GROUP = -1
"""Value of ``optimizer_parts``: all ranks that would hold copies hold different parts."""
_OF_A_STAGE = re.compile(r"(\d{1,6})-(.+)", re.DOTALL)
_HINT = "name the file of strategy_ckpt_save_file, the merged one, or the directory with those of all ranks"


class Cut(msgspec.Struct, frozen=True):
    """The cut of one parameter over the ranks of its pipeline stage.

    Attributes:
        devices: number of ranks along each axis of the device matrix.
        axes: per dimension the indices in ``devices`` of the axes that cut it, outermost first.
        rows: length of each slice along dimension 0, if they are uneven; otherwise empty.
        fields: number of parts of an embedding table that is cut by field; 0 if it is not.
        optimizer_stride: distance in ranks between the parts of optimizer parallelism.
        optimizer_parts: parts of the first dimension by optimizer parallelism (0 means no such parts, ``WHOLE_GROUP``
            one per copy).
    """

    devices: tuple[int, ...]
    axes: tuple[tuple[int, ...], ...]
    rows: tuple[int, ...] = ()
    fields: int = 0
    optimizer_stride: int = 0
    optimizer_parts: int = 0

    @property
    def ranks(self) -> int:
        """Number of ranks of the stage."""
        return math.prod(self.devices)


class Strategy(msgspec.Struct, frozen=True):
    """The cut of each parameter, by pipeline stage and name."""

    stages: dict[int, dict[str, Cut]]

    @property
    def ranks_per_stage(self) -> int:
        """Number of ranks of one stage. The ranks of stage s start at s times this number."""
        return next(iter(next(iter(self.stages.values())).values())).ranks


def read_strategy(path: Path) -> Strategy:
    """Return the content of a strategy file, or of all strategy files in a directory.

    Raises:
        UsageError: a file cannot be read, or the directory has no strategy file.
        CheckpointInvalid: a file is damaged, or files contradict each other.
    """
    if not path.is_dir():
        return _checked(_read(path), str(path))
    names = sorted(p for p in path.iterdir() if p.suffix in (".ckpt", ".json") and p.is_file())
    if not names or len(names) > FILES_MAX:
        raise UsageError(f"{path} holds {len(names) or 'no'} strategy files", hint=_HINT)
    found: dict[int, dict[str, Cut]] = {}
    said_by: dict[int, Path] = {}
    for name in names:
        for stage, cuts in _read(name).items():
            if found.setdefault(stage, cuts) != cuts:
                raise CheckpointInvalid(
                    f"{name} and {said_by[stage]} say different things of stage {stage}: of two trainings?",
                    hint="keep the strategy files of one training in the directory",
                )
            said_by.setdefault(stage, name)
    return _checked(found, str(path))


def _read(path: Path) -> dict[int, dict[str, Cut]]:
    try:
        data = read_given(path, FILE_SIZE_BYTES_MAX)
    except OSError as error:
        raise UsageError(f"cannot read the strategy file {path}: {error.strerror}", hint=_HINT) from error
    return decode_strategy(data, str(path))


def decode_strategy(data: bytes, where: str) -> dict[int, dict[str, Cut]]:
    """Return the cut of each parameter in the bytes of a strategy file (JSON or protobuf), by stage and name.

    Raises:
        CheckpointInvalid: the error names the file (``where``) and the broken rule.
    """
    try:
        stage, layouts = _of_json(data) if data.lstrip()[:1] == b"{" else _of_protobuf(data)
        cuts = {name: _cut(name, layout) for name, layout in layouts.items()}
    except (ValueError, msgspec.DecodeError, RecursionError) as error:
        raise CheckpointInvalid(f"{where}: no strategy file of MindSpore's: {error}", hint=_HINT) from error
    if not cuts:
        raise CheckpointInvalid(f"{where}: a strategy file without any parameter", hint=_HINT)
    merged = {name: _OF_A_STAGE.fullmatch(name) for name in cuts}
    if not all(merged.values()):
        return {stage: cuts}
    found: dict[int, dict[str, Cut]] = {}
    for name, match in merged.items():
        if match:
            found.setdefault(int(match[1]), {})[match[2]] = cuts[name]
    return found


def _checked(stages: dict[int, dict[str, Cut]], where: str) -> Strategy:
    """Return the strategy of ``stages`` after a check of the stage numbers and the numbers of ranks.

    Raises:
        CheckpointInvalid: a stage number is too large, or two stages differ in their number of ranks.
    """
    if max(stages) > STAGE_MAX:
        raise CheckpointInvalid(
            f"{where}: pipeline stage {max(stages)}, the limit is {STAGE_MAX}", hint=_HINT
        )
    first = next(iter(stages.values()))
    name, cut = next(iter(first.items()))
    for cuts in stages.values():
        for other, one in cuts.items():
            if one.ranks != cut.ranks:
                raise CheckpointInvalid(
                    f"{where}: {name} is cut over {cut.ranks} ranks and {other} over {one.ranks}", hint=_HINT
                )
    return Strategy(dict(sorted(stages.items())))


# ---------------------------------------------------------------- the JSON and the protobuf form


class _Layout(msgspec.Struct):
    """The cut of one parameter as a strategy file describes it, with the field names of the JSON form."""

    dev_matrix: list[int]
    tensor_map: list[int | list[int]]
    param_split_shape: list[int] = []
    field: int = 0
    optimizer_stride: int = msgspec.field(default=0, name="opt_weight_shard_step")
    optimizer_parts: int = msgspec.field(default=0, name="opt_weight_shard_size")


class _Stage(msgspec.Struct):
    stage: int = 0


class _File(msgspec.Struct):
    parallel_layout_item: dict[str, _Layout] = {}
    parallel_strategy_item: dict[str, _Stage] = {}


def _cut(name: str, layout: _Layout) -> Cut:
    """Check the cut of one parameter as a strategy file describes it. Return it as a :class:`Cut`.

    Raises:
        ValueError: such a cut is impossible.
    """
    devices = layout.dev_matrix
    if not devices or len(devices) > DIMENSIONS_MAX or len(layout.tensor_map) > DIMENSIONS_MAX:
        raise ValueError(f"{name}: a device matrix of {len(devices)} axes")
    if min(devices) < 1 or math.prod(devices) > RANKS_MAX:
        raise ValueError(f"{name}: a device matrix {devices}, with at most {RANKS_MAX} ranks")
    axes: list[tuple[int, ...]] = []
    for entry in layout.tensor_map:
        places = entry if isinstance(entry, list) else [entry]
        if any(not -1 <= place < len(devices) for place in places):
            raise ValueError(f"{name}: tensor map {places} of {len(devices)} axes")
        axes.append(tuple(len(devices) - 1 - place for place in places if place >= 0))
    used = [axis for dimension in axes for axis in dimension]
    if len(used) != len(set(used)):
        raise ValueError(f"{name}: one axis of its tensor map cuts twice")
    if any(not 0 <= n <= LENGTH_MAX for n in layout.param_split_shape):
        raise ValueError(f"{name}: impossible lengths of uneven parts")
    if layout.optimizer_parts < WHOLE_GROUP or layout.field < 0:
        raise ValueError(f"{name}: a negative number of parts")
    stride, parts = layout.optimizer_stride, layout.optimizer_parts
    if not stride or not parts:  # 0 in either field means "not cut" in MindSpore
        stride = parts = 0
    return Cut(tuple(devices), tuple(axes), tuple(layout.param_split_shape), layout.field, stride, parts)


def _of_json(data: bytes) -> tuple[int, Mapping[str, _Layout]]:
    """Return the pipeline stage and the cut of each parameter by name, from the JSON form of a strategy file."""
    file = msgspec.json.decode(data, type=_File)
    stage = next(iter(file.parallel_strategy_item.values()), _Stage()).stage
    if stage < 0:
        raise ValueError(f"pipeline stage {stage}")
    return stage, file.parallel_layout_item


def _of_protobuf(data: bytes) -> tuple[int, Mapping[str, _Layout]]:
    """Return the pipeline stage and the cut of each parameter by name, from a ``ParallelStrategyMap`` message."""
    stages: list[int] = []
    layouts: dict[str, _Layout] = {}
    told = _Told()
    for number, value in fields(data):
        if number == 2 and not stages:
            stages.append(_stage(value))
        elif number == 3:
            name, layout = _item(value, told)
            if name in layouts:
                raise ValueError(f"{name} is there twice")
            layouts[name] = layout
    return next(iter(stages), 0), layouts


def _stage(item: Value) -> int:
    """Return the pipeline stage in a ``ParallelStrategyItem`` message."""
    strategies = [value for number, value in fields(message(item)) if number == 2]
    found = [integer(value) for each in strategies for number, value in fields(message(each)) if number == 1]
    return found[-1] if found else 0


def _item(item: Value, told: _Told) -> tuple[str, _Layout]:
    """Return the name and the cut of the parameter in a ``ParallelLayoutItem`` message."""
    name, layout = "", _Layout([], [])
    for number, value in fields(message(item)):
        if number == 1:
            name = text(value)
        elif number == 2:
            layout = _layout(message(value), told)
    return name, layout


def _layout(data: memoryview, told: _Told) -> _Layout:
    """Return the cut of a parameter in a ``ParallelLayouts`` message, without field 4 (index offsets of a lookup)."""
    lists: dict[int, list[list[int]]] = {1: [], 2: [], 3: []}
    numbers = {5: 0, 6: 0, 7: 0}
    for number, value in fields(data):
        if number in lists:
            lists[number].append(told.numbers(message(value)))
        elif number in numbers:
            numbers[number] = integer(value)
    matrices, maps, splits = lists[1], lists[2], lists[3]
    if len(matrices) > 1 or len(splits) > 1:
        raise ValueError("a layout with several device matrices")
    flat: Iterable[int | list[int]] = maps[0] if len(maps) == 1 else [each for each in maps if each]
    return _Layout(
        [n for m in matrices for n in m], list(flat), [n for s in splits for n in s], *numbers.values()
    )


class _Told:
    """A counter of the numbers read from one file. It raises an error above ``NUMBERS_MAX``."""

    def __init__(self) -> None:
        self.count = 0

    def numbers(self, data: memoryview) -> list[int]:
        """Return the numbers in the repeated field 1 of a message, and add their count to ``count``."""
        found: list[int] = []
        for number, value in fields(data):
            if number != 1:
                continue
            for one in repeated(value):
                self.count += 1
                if self.count > NUMBERS_MAX:
                    raise ValueError(f"it holds more than {NUMBERS_MAX} numbers")
                found.append(integer(one))
        return found
