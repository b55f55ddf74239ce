"""The export of checkpoints to other programs' formats: ``torch.save`` file, torch DCP directory, Hugging Face files.

Theory. The formats ``torch`` and ``dcp`` hold one tree: ``model`` (for ``module.load_state_dict``, extra state
included), ``optimizer`` (for ``torch.distributed.checkpoint.state_dict.set_optimizer_state_dict``; by name if there are
several), ``scheduler``, ``scaler``, ``state`` and ``step``. The tree contains only types that
``torch.load(weights_only=True)`` reads: arrays become tensors, and sets and deques become lists. The format ``hf``
holds only the model's weights and buffers.

Invariants:
1. Only verified bytes are written; an output appears whole or not at all.
2. Memory stays small, because the tensors are in a scratch file (``mmap_scratch.py``). So the disk needs room for twice
   the size of the output.
"""

from __future__ import annotations

import os
import warnings
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from holdfast.errors import CheckpointInvalid, StoreWriteError
from holdfast.frameworks.common.state_tree import Plain, join
from holdfast.frameworks.common.weight_selection import is_sessions, joined_values, weights, weights_of
from holdfast.frameworks.torch.files.dcp_keys import KEYS, note_keys
from holdfast.frameworks.torch.files.mmap_scratch import scratch_tensors
from holdfast.frameworks.torch.state.boxes import TORCH_DTYPES, byte_view
from holdfast.store.backends.durable_files import SHARED, Directory, new_owner
from holdfast.store.backends.location import Place
from holdfast.store.layouts.layout import Box
from holdfast.store.manage.checkpoint_root import resolve
from holdfast.store.manage.checkpoint_tools import merge, new_directory, parent_of_new
from holdfast.store.read.load import LoadTarget, Opened, load_into, opened

Form = Literal["dcp", "torch", "hf"]
FILE_SIZE_BYTES_MAX = 5_000_000_000
BATCH_SIZE_BYTES = 256 * 1024 * 1024
Progress = Callable[[int], object]


def export_checkpoint(
    path: Place | str | os.PathLike[str] | Opened,
    target: str | os.PathLike[str],
    to: Form,
    *,
    file_size_bytes_max: int = FILE_SIZE_BYTES_MAX,
    progress: Progress = int,
) -> tuple[str, ...]:
    """Write a checkpoint in another format.

    Args:
        path: a checkpoint, a directory of checkpoints, or ``DIRECTORY@STEP``.
        target: the file (``torch``) or directory (``dcp``, ``hf``) to make.
        to: the format.
        file_size_bytes_max: for ``hf``: a larger model is written as several files with an index.
        progress: called with the size in bytes of every part that was read and verified.

    Returns:
        The paths of the files or directories made.

    Raises:
        UsageError: no such checkpoint, or ``target`` exists.
        NothingToResume: the directory holds no valid checkpoint.
        CheckpointInvalid: the checkpoint is damaged.
        StateError: a value that this format cannot hold; the error names it.
        StoreWriteError: the output cannot be written; no part of it remains.
    """
    goal = Path(target)
    parent = parent_of_new(goal)
    with opened(path if isinstance(path, Opened) else resolve(path)) as source:
        if to == "hf":
            names = frozenset(weights_of(source))
            return merge(
                source, goal, file_size_bytes_max=file_size_bytes_max, names=names, progress=progress
            )
        state = _state(source, parent, progress)
    if to == "torch":
        with Directory.open(parent) as directory:
            with directory.temporary(goal.name, new_owner("export"), replace=False, mode=SHARED) as fd:
                _write_file(state, fd, goal)
            directory.sync()
    else:
        with new_directory(goal) as hidden:
            _write_dcp(state, hidden, goal)
    return (str(goal),)


def _write_file(state: Mapping[str, Any], fd: int, goal: Path) -> None:
    try:
        with open(fd, "wb", closefd=False) as file:
            torch.save(state, file)
    except (OSError, RuntimeError) as error:  # torch's zip writer raises RuntimeError for an OSError
        raise StoreWriteError(f"cannot write {goal}: {_cause(error)}") from error


def _write_dcp(state: dict[str, Any], folder: Path, goal: Path) -> None:
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is", UserWarning)
            keys = note_keys(state)
            whole = {**state, KEYS: keys} if keys else state
            save(whole, storage_writer=FileSystemWriter(folder, thread_count=1), no_dist=True)
    except (OSError, RuntimeError, CheckpointException) as error:
        raise StoreWriteError(f"cannot write {goal}: {_cause(error)}") from error


def _cause(error: BaseException) -> str:
    """Return the text of the first operating-system error in the chain of causes, or the first line of ``error``."""
    inner: BaseException | None = error
    while inner is not None:
        if isinstance(inner, OSError) and inner.strerror:
            return inner.strerror
        inner = inner.__cause__ or inner.__context__
    return (str(error).splitlines() or [type(error).__name__])[0]


def _state(source: Opened, scratch: Path, progress: Progress) -> dict[str, Any]:
    """Return the whole training state of a checkpoint as one tree, with its tensors in a scratch file."""
    catalogue, values = source.index.catalogue, joined_values(source)
    step = source.index.save_id.step
    wanted = {t.fqn: (TORCH_DTYPES[t.dtype], t.shape) for t in catalogue.tensors}
    tensors = scratch_tensors(wanted, scratch)
    _fill(source, tensors, progress)
    model = {fqn: tensors[fqn] for fqn in weights(catalogue, values)}
    if not is_sessions(values):
        return {"model": model, "step": step}

    def fetch(stands_for: Plain) -> torch.Tensor:
        while isinstance(stands_for, dict):  # an array's entry
            stands_for = stands_for["array"]
        if stands_for not in tensors:
            raise CheckpointInvalid(f"{source}: the values name {stands_for}, which the catalogue lacks")
        return tensors[stands_for]

    def whole(key: str) -> dict[str, Any]:
        made: dict[str, Any] = _readable(join(values.get(key, {}), fetch))
        return made

    model |= whole("modules")
    model |= {alias: model[fqn] for alias, fqn in values["aliases"].items() if fqn in model}
    optimizers = {name: _optimizer(saved) for name, saved in whole("optimizers").items()}
    # A DCP directory holds the data of each name separately. The aliases show a reader which names were one tensor.
    state: dict[str, Any] = {"model": model, "step": step, "aliases": values["aliases"]}
    state["optimizer"] = _single(optimizers)
    state["scheduler"] = _single(whole("schedulers"))
    state["state"] = whole("state")
    state["scaler"] = _readable(join(values.get("scaler"), fetch))
    return {key: value for key, value in state.items() if key in ("model", "step") or value}


def _fill(source: Opened, tensors: Mapping[str, torch.Tensor], progress: Progress) -> None:
    """Read and verify all tensors, in batches of about ``BATCH_SIZE_BYTES``."""
    catalogue = source.index.catalogue
    batch: list[LoadTarget] = []
    size_bytes = 0
    for entry in catalogue.tensors:
        data = byte_view(tensors[entry.fqn])
        batch.append(LoadTarget(entry.fqn, Box.whole(entry.shape), entry.dtype, data, entry.shape))
        size_bytes += len(data)
        if size_bytes >= BATCH_SIZE_BYTES or entry is catalogue.tensors[-1]:
            load_into(source, batch, known=catalogue.by_fqn)
            progress(size_bytes)
            batch, size_bytes = [], 0


def _optimizer(saved: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state of an optimizer in torch's format, by parameter name."""
    groups = [dict(group) for group in saved["groups"]]
    members = saved.get("members")
    if members is None:  # an older checkpoint: the members are known only if there is one group
        members = [list(saved["state"])] if len(groups) == 1 else None
    for index, group in enumerate(groups):
        group.pop("param_names", None)
        if members is not None:
            group["params"] = list(members[index])
    return {"state": dict(saved["state"]), "param_groups": groups}


def _single(named: dict[str, Any]) -> Any:
    """Return the only value of ``named`` if the user gave it without a name; otherwise the dict itself."""
    return named["default"] if set(named) == {"default"} else named


def _readable(value: Any) -> Any:
    """Return ``value`` converted to the types that ``torch.load(weights_only=True)`` reads."""
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, dict):
        return type(value)({key: _readable(item) for key, item in value.items()})
    if isinstance(value, tuple):
        return tuple(_readable(item) for item in value)
    if isinstance(value, list | deque):
        return [_readable(item) for item in value]
    if isinstance(value, set | frozenset):
        return [_readable(item) for item in sorted(value, key=repr)]
    return value
