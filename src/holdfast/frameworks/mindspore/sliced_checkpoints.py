"""The merging of MindSpore's sliced checkpoints (``rank_N/*.ckpt`` and strategy files) into one checkpoint.

Theory. The strategy says which part of a parameter each rank of a pipeline stage holds
(``store/mindspore/strategy.py``, ``store/mindspore/slices.py``). When a tensor is written, it is joined from one holder
of each part, so memory holds one tensor at a time. A whole tensor can be loaded into any layout. Everything is checked
before the first byte is written: no part is missing; ranks and stages that hold copies hold the same bits; all files
are of one step. A parameter that the strategy does not name (``global_step``) is whole on each rank. Without the
training cell, the name shows whether a tensor belongs to the optimizer. Such a name is ``KIND.WEIGHT`` with a kind that
MindSpore's optimizers use, or the name of one of their counters. The state of a user-defined optimizer keeps its name.

Invariants:
1. The written tensors have the bits of the slices. Three cases are refused by name: a copy that differs, a part that is
   missing, and a tensor that may be cut although the strategy does not say so.
"""

from __future__ import annotations

import logging
import math
import os
import re
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from holdfast.errors import CheckpointInvalid, StateError, UsageError
from holdfast.frameworks.common.imported_checkpoint import Progress, write_imported
from holdfast.frameworks.common.state_tree import Plain
from holdfast.store.backends.durable_files import reading
from holdfast.store.backends.location import Place, place_of
from holdfast.store.layouts.box import Box, Shape
from holdfast.store.layouts.layout import RankLayout, TensorMeta
from holdfast.store.mindspore.slice_file import SliceFile, SliceTensor, bits_of, read_slice_file
from holdfast.store.mindspore.slices import place
from holdfast.store.mindspore.strategy import Cut, Strategy, read_strategy
from holdfast.text import plural, ranges

log = logging.getLogger("holdfast")

OPTIMIZER = "optimizer."
"""Prefix of the names of an optimizer's tensors in a session's checkpoint."""
STEP_NAMES = ("global_step", "step_num")
NOT_STATE = frozenset({"epoch_num", "step_num"})
"""Entries that MindSpore's ``append_info`` adds to a file. They are not part of the state."""
SLOTS = frozenset({
    "accum", "accum_update", "adam_m", "adam_v", "ax", "ax_", "exp_avg", "exp_avg_sq", "exp_inf", "lamb_m", "lamb_v",
    "linear", "max_exp_avg_sq", "mean_grad", "mean_square", "moment", "moment1", "moment2", "moments", "momentum_buf",
    "prev", "stat", "step_size", "vhat",
})  # fmt: skip
"""Prefixes that MindSpore's optimizers add to the name of a weight."""
COUNTERS = frozenset({"global_step", "learning_rate", "beta1_power", "beta2_power", "momentum"})
OF_A_RUN = ("accu_grads", "inputs")
"""Prefixes of names in a strategy file that may be missing in a checkpoint; MindSpore's tools also skip them."""
NAMED = 10
"""The largest number of names in one message."""
_DIRECTORY = re.compile(r"(rank|ckpt)_(\d{1,7})")
_EPOCH_AND_STEP = re.compile(r"-(\d{1,18})_(\d{1,18})\.ckpt")


class Merged(NamedTuple):
    """One tensor, joined from boxes. ``parts`` has the stored data and the file of each box."""

    dtype: str
    shape: Shape
    parts: dict[Box, tuple[SliceTensor, Path]]

    def bits(self) -> NDArray[np.generic]:
        """Return the whole tensor as an array of unsigned integers with its bits."""
        whole = np.empty(self.shape, bits_of(self.dtype))
        for box, (stored, _) in self.parts.items():
            whole[tuple(slice(o, e) for o, e in zip(box.offsets, box.ends, strict=True))] = stored.array()
        return whole


class Slices:
    """The state that sliced files hold together, as a source of whole tensors for a save.

    Args:
        tensors: the tensors by MindSpore's name.
        step: number of updates done; None if the files do not contain it.
    """

    def __init__(self, tensors: Mapping[str, Merged], step: int | None) -> None:
        self.tensors = tensors
        self.step = step
        self.values: dict[str, Plain] = {
            "optimizers": {},
            "schedulers": {},
            "state": {},
            "framework": "mindspore",
        }
        self._by_fqn = {session_name(name, tensors): tensor for name, tensor in tensors.items()}

    def layout(self, rank: int, world_size: int) -> RankLayout:
        """Return the layout of ``rank``, which has every tensor as a whole."""
        metas = (TensorMeta(f, t.dtype, t.shape, Box.whole(t.shape)) for f, t in self._by_fqn.items())
        return RankLayout(rank, tuple(metas), world_size)

    def view(self, fqn: str, box: Box) -> memoryview:
        """Return the bytes of the whole tensor ``fqn``. Raises: StateError: ``box`` is not the whole tensor."""
        tensor = self._by_fqn.get(fqn)
        if tensor is None or box != Box.whole(tensor.shape):
            raise StateError(f"tensor {fqn!r}: part {box} is not held here")
        bits = tensor.bits()
        return bits.reshape(-1).view(np.uint8).data if bits.size else memoryview(b"")


def import_slices(
    source: str | os.PathLike[str],
    strategy: str | os.PathLike[str],
    root: Place | str | os.PathLike[str],
    *,
    step: int | None = None,
    progress: Callable[[int], Progress] = lambda size_bytes: int,
    note: Callable[[str], object] = log.info,
) -> Place:
    """Write the sliced checkpoint of a parallel training as a checkpoint below ``root``.

    Args:
        source: directory with ``rank_N/*.ckpt`` (or ``ckpt_N/*.ckpt``). If a rank has several files, the newest by its
            name (``PREFIX-EPOCH_STEP.ckpt``) is taken.
        strategy: the strategy file, the merged file of all pipeline stages, or the directory with the files of all
            ranks.
        step: number of updates done; None means the files' ``global_step``, or their ``step_num``.
        progress: called with the total size in bytes. The function that it returns is called with the size of each
            written part.
        note: called with a line of text for the user about each kind of data that was left out.

    Returns:
        The place of the new checkpoint.

    Raises:
        UsageError: there are no such files, the strategy is of fewer ranks, or the files do not contain their step.
        CheckpointInvalid: a file is damaged, slices are missing, copies differ, or the strategy is of another network.
        StoreWriteError: ``root`` cannot be written.

    Example:
        ``import_slices("output/", "strategy/merged.ckpt", "ckpts/")``
    """
    slices = read_slices(Path(source), Path(strategy), note)
    done = slices.step if step is None else step
    if done is None:
        raise UsageError(f"{source} does not say its step", hint="holdfast ckpt import --step N")
    return write_imported(place_of(root), done, slices, slices.values, progress)


def read_slices(source: Path, strategy: Path, note: Callable[[str], object]) -> Slices:
    """Return the whole tensors of a sliced checkpoint. Every slice is read and compared with its copies.

    Raises:
        UsageError, CheckpointInvalid: see :func:`import_slices`.
    """
    told = read_strategy(strategy)
    paths = _files(source, told, strategy, note)
    files = {rank: read_slice_file(path) for rank, path in paths.items()}
    step = _step(files)
    whole = Cut((told.ranks_per_stage,), ())
    tensors: dict[str, Merged] = {}
    for stage, cuts in told.stages.items():
        first = stage * told.ranks_per_stage
        held = {rank - first: files[rank] for rank in files if 0 <= rank - first < told.ranks_per_stage}
        others = {n for other, names in told.stages.items() if other != stage for n in names}
        for name in sorted({name for file in held.values() for name in file.tensors}):
            if name in NOT_STATE or (name not in cuts and name in others):
                continue  # a parameter of another stage, which that stage describes
            try:
                tensor = _merged(name, cuts.get(name, whole), held, first)
            except ValueError as error:
                raise CheckpointInvalid(f"{source}: {name}: {error}", hint=_hint(strategy)) from error
            _add(tensors, name, tensor, source)
    _compare_with_strategy(tensors, told, source, strategy, note)
    _refuse_whole_files(tensors, source)
    if texts := sorted({name for file in files.values() for name in file.texts}):
        note(f"texts in the files are left out: {', '.join(texts[:NAMED])}")
    return Slices(tensors, step)


def session_name(name: str, names: Collection[str]) -> str:
    """Return the name that a session's checkpoint has for MindSpore's tensor ``name``.

    Args:
        names: the names of all tensors of the training, which show whether ``name`` is an optimizer slot.
    """
    return f"{OPTIMIZER}{name}" if name in COUNTERS or slot_of(name) in names else name


def slot_of(name: str) -> str:
    """Return the name of the weight to which the optimizer slot ``name`` belongs; empty if ``name`` is not a slot."""
    kind, _, weight = name.partition(".")
    return weight if kind in SLOTS else ""


def _hint(strategy: Path) -> str:
    return f"is {strategy} the strategy of this training, and are all files of one save?"


# ---------------------------------------------------------------- which files


def _files(source: Path, strategy: Strategy, said_by: Path, note: Callable[[str], object]) -> dict[int, Path]:
    """Return the file of each rank, by rank.

    Raises:
        UsageError: no directory with files of ranks, ranks that the strategy does not know, or several files of one
            rank with no newest one.
        CheckpointInvalid: the file names are of two steps.
    """
    if not source.is_dir():
        raise UsageError(
            f"{source} is no directory", hint="name the directory that holds rank_0, rank_1, ..."
        )
    found: dict[str, dict[int, Path]] = {}
    with reading(source):
        inside = sorted(source.iterdir())
    for path in inside:
        if (match := _DIRECTORY.fullmatch(path.name)) and path.is_dir():
            found.setdefault(match[1], {})[int(match[2])] = path
    folders = found.get("rank") or found.get("ckpt") or {}
    first, count = strategy.ranks_per_stage * min(strategy.stages), strategy.ranks_per_stage
    ranks = {rank for stage in strategy.stages for rank in range(stage * count, (stage + 1) * count)}
    if strange := sorted(folders.keys() - ranks):
        raise UsageError(
            f"{said_by} describes {plural(len(ranks), 'rank')} from {first} on, and {folders[strange[0]]} is of "
            "another one",
            hint="name the merged strategy file, or the directory with the strategy files of all ranks",
        )
    paths = {rank: file for rank in sorted(folders) if (file := _newest(folders[rank])) is not None}
    if not paths:
        raise UsageError(
            f"{source} holds no rank_N/*.ckpt", hint="name the directory that holds rank_0, rank_1, ..."
        )
    keys = {path: key for path in paths.values() if (key := _epoch_and_step(path))}
    if other := next((path for path, key in keys.items() if key != next(iter(keys.values()))), None):
        raise CheckpointInvalid(
            f"the newest slices are of two steps: {next(iter(keys))} and {other}",
            hint="keep the files of one save: the newest that every rank has",
        )
    if missing := sorted(ranks - paths.keys()):
        note(f"no file of rank {ranges(missing)}: only copies can stand in")
    return paths


def _newest(folder: Path) -> Path | None:
    """Return the file of the newest step in one rank's directory; None if there is no file.

    Raises:
        UsageError: there are several files, and their names do not show which is the newest.
    """
    paths = sorted(path for path in folder.glob("*.ckpt") if path.is_file())
    if len(paths) < 2:
        return paths[0] if paths else None
    keyed = sorted((key, path) for path in paths if (key := _epoch_and_step(path)))
    if len(keyed) < len(paths) or keyed[-1][0] == keyed[-2][0]:
        raise UsageError(
            f"{folder} holds several files, and their names do not tell the newest: "
            f"{', '.join(path.name for path in paths[:NAMED])}",
            hint="keep one file of each rank",
        )
    return keyed[-1][1]


def _epoch_and_step(path: Path) -> tuple[int, int] | None:
    """Return epoch and step from a name of ``ModelCheckpoint`` (``PREFIX-EPOCH_STEP.ckpt``); None for other names."""
    match = _EPOCH_AND_STEP.search(path.name)
    return None if match is None else (int(match[1]), int(match[2]))


def _step(files: Mapping[int, SliceFile]) -> int | None:
    """Return the number of updates done according to the files; None if the files do not contain it.

    Raises:
        CheckpointInvalid: the files are of two steps.
    """
    said: dict[int, Path] = {}
    for file in files.values():
        stored = next((file.tensors[name] for name in STEP_NAMES if name in file.tensors), None)
        if stored is None or math.prod(stored.shape) != 1 or stored.dtype not in ("I32", "I64"):
            continue
        step = int(stored.array().reshape(-1)[0])
        said.setdefault(step, file.path)
    if len(said) > 1:
        steps = " and ".join(f"{path} is of step {step}" for step, path in list(said.items())[:2])
        raise CheckpointInvalid(
            f"the slices are of several steps: {steps}", hint="keep the files of one save"
        )
    return next(iter(said), None)


# ---------------------------------------------------------------- tensors


def _merged(name: str, cut: Cut, held: Mapping[int, SliceFile], first_rank: int) -> Merged:
    """Return one tensor of a pipeline stage, joined from its parts. Its copies are compared first.

    Raises:
        ValueError: the parts cannot be joined, or copies differ.
    """
    slices = {rank: file.tensors[name] for rank, file in held.items() if name in file.tensors}
    dtypes = {stored.dtype: held[rank].path for rank, stored in slices.items()}
    if len(dtypes) > 1:
        raise ValueError(" and ".join(f"{path} has it as {dtype}" for dtype, path in dtypes.items()))
    placed = place(cut, {rank: stored.shape for rank, stored in slices.items()}, first_rank)
    parts: dict[Box, tuple[SliceTensor, Path]] = {}
    for box, (first, *copies) in placed.holders.items():
        for rank in copies:
            if not _same(slices[first], slices[rank]):
                raise ValueError(
                    f"{held[first].path} and {held[rank].path} should hold copies, and they differ"
                )
        parts[box] = (slices[first], held[first].path)
    return Merged(next(iter(dtypes)), placed.shape, parts)


def _same(one: SliceTensor, other: SliceTensor) -> bool:
    return np.array_equal(one.array(), other.array())


def _add(tensors: dict[str, Merged], name: str, tensor: Merged, source: Path) -> None:
    """Add a tensor to ``tensors``. If an earlier pipeline stage has added it, compare the two.

    Raises:
        CheckpointInvalid: the tensors of the two stages differ.
    """
    before = tensors.setdefault(name, tensor)
    if before is tensor:
        return
    if before[:2] == tensor[:2] and np.array_equal(before.bits(), tensor.bits()):
        return
    files = " and ".join(str(next(iter(each.parts.values()))[1]) for each in (before, tensor))
    raise CheckpointInvalid(
        f"{source}: {name} differs between pipeline stages: {files}", hint="are all files of one save?"
    )


def _compare_with_strategy(
    tensors: Mapping[str, Merged],
    strategy: Strategy,
    source: Path,
    said_by: Path,
    note: Callable[[str], object],
) -> None:
    """Refuse a strategy of another network, and a tensor that may be cut although the strategy does not say so.

    Raises:
        CheckpointInvalid: the error names the tensor.
    """
    cuts = {name: cut for stage in strategy.stages.values() for name, cut in stage.items()}
    absent = [name for name in cuts if name not in tensors and not name.startswith(OF_A_RUN)]
    lacking = [name for name in absent if slot_of(name) not in tensors]
    if lacking:
        raise CheckpointInvalid(
            f"{source} lacks what {said_by} describes: {', '.join(lacking[:NAMED])}", hint=_hint(said_by)
        )
    if absent:
        note(f"without optimizer state, which the files do not hold: {', '.join(absent[:NAMED])}")
    unknown = [name for name in tensors if name not in cuts and math.prod(tensors[name].shape) != 1]
    for name in unknown:
        weight = cuts.get(slot_of(name))
        if weight is not None and (any(weight.axes) or weight.optimizer_parts):
            raise CheckpointInvalid(
                f"{source}: {said_by} does not say how {name} is cut, and {slot_of(name)} is cut there",
                hint=_hint(said_by),
            )
    if unknown:
        note(f"not in the strategy, taken as whole: {', '.join(unknown[:NAMED])}")


def _refuse_whole_files(tensors: Mapping[str, Merged], source: Path) -> None:
    """Refuse files of ``integrated_save=True``: they hold whole tensors, which would be joined as if they were parts.

    Raises:
        CheckpointInvalid: all parts of every cut tensor are equal, although the numbers in a part are not all equal.
    """
    varied = ""
    for name, tensor in tensors.items():
        first, *rest = (stored for stored, _ in tensor.parts.values())
        if not rest:
            continue
        if any(stored.shape != first.shape or not _same(first, stored) for stored in rest):
            return
        bits = first.array().reshape(-1)
        if bits.size and (bits != bits[0]).any():
            varied = varied or name
    if varied:
        raise CheckpointInvalid(
            f"{source}: all ranks hold the same numbers of {varied} where the strategy cuts it: these files are whole",
            hint="load one of them as it is: holdfast.mindspore.import_checkpoint(FILE, cell, ROOT)",
        )
