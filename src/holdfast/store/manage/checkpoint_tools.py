"""Tools for checkpoints outside of a run: list the holders of boxes, merge a checkpoint into one file.

Theory. A merge streams the tensors slab by slab (a slab is a range of elements in C order) through the verifying
reader of a load. So a merge needs memory for one slab, and all its bytes are verified.

Invariants:
1. An output appears whole or not at all, and never replaces an existing file.
2. Every copied byte was verified by the digest of its extent (piece of a file).
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Collection, Iterator, Sequence
from fnmatch import fnmatchcase
from math import prod
from pathlib import Path

import msgspec

from holdfast.errors import UsageError
from holdfast.store.backends.durable_files import (
    SHARED,
    TEMPORARY_PREFIX,
    Directory,
    new_owner,
    sync_directory,
    write_at,
    writing,
)
from holdfast.store.backends.location import Place
from holdfast.store.format.safetensors_codec import encode_header
from holdfast.store.layouts.layout import DTYPE_SIZE_BYTES, Box, Shape, TensorEntry, flat_range_boxes
from holdfast.store.read.load import BoxLoader, Opened, load_catalogue, opened

THREADS = 4
SLAB_SIZE_BYTES = 64 * 1024 * 1024
INDEX_NAME = "model.safetensors.index.json"
WEIGHTS_NAME = "model.safetensors"


class BoxRecordHolders(msgspec.Struct, frozen=True):
    """One box and the ranks that held identical copies of it when it was saved."""

    fqn: str
    dtype: str
    shape: Shape
    box: Box
    ranks: tuple[int, ...]


def holdings(path: Place, pattern: str = "*") -> Iterator[BoxRecordHolders]:
    """Iterate over the boxes, with holders, of the tensors whose names match ``pattern`` (``fnmatch``).

    The boxes are computed one after the other, because their number may be the number of tensors times that of ranks.

    Raises:
        CheckpointInvalid: the checkpoint is not valid (raised at once, not during the iteration).
    """
    catalogue = load_catalogue(path)
    return (
        BoxRecordHolders(t.fqn, t.dtype, t.shape, box, ranks)
        for t in catalogue.tensors
        if fnmatchcase(t.fqn, pattern)
        for box, ranks in catalogue.boxes(t)
    )


def merge(
    path: Place | Opened,
    target: Path,
    *,
    file_size_bytes_max: int = 0,
    names: Collection[str] | None = None,
    progress: Callable[[int], object] = int,
) -> tuple[str, ...]:
    """Write the complete tensors of a checkpoint as one safetensors file, or as a directory in the Hugging Face form.

    Args:
        path: the checkpoint.
        target: the file to make. With ``file_size_bytes_max`` > 0, the directory to make. It gets
            ``model.safetensors``, or several files of at most that size and an index. A larger tensor gets a separate
            file.
        file_size_bytes_max: largest size of one file in bytes; with 0 one file is written.
        names: names of the tensors to write; None means all.
        progress: called with the size in bytes of every slab written.

    Returns:
        The paths of the files made.

    Raises:
        UsageError: the target exists.
        CheckpointInvalid: the checkpoint is damaged.
        StoreWriteError: the output cannot be written, or another process has made the target.
    """
    parent = parent_of_new(target)
    with opened(path) as source:
        loader = BoxLoader(source.directory, source.index, THREADS)
        tensors = [t for t in source.index.catalogue.tensors if names is None or t.fqn in names]
        if file_size_bytes_max:
            made = _merge_directory(loader, tensors, target, file_size_bytes_max, progress)
            return tuple(str(target / name) for name in made)
        with Directory.open(parent) as directory:
            _merge_file(loader, tensors, directory, target.name, progress)
    return (str(target),)


def _merge_directory(
    loader: BoxLoader,
    tensors: Sequence[TensorEntry],
    target: Path,
    file_size_bytes_max: int,
    progress: Callable[[int], object],
) -> list[str]:
    """Write the files of a new directory ``target``. Return their names."""
    groups: list[list[TensorEntry]] = [[]]
    size_bytes = 0
    for tensor in tensors:
        if groups[-1] and size_bytes + tensor.size_bytes > file_size_bytes_max:
            groups.append([])
            size_bytes = 0
        groups[-1].append(tensor)
        size_bytes += tensor.size_bytes
    made = [f"model-{n:05d}-of-{len(groups):05d}.safetensors" for n in range(1, len(groups) + 1)]
    if len(groups) == 1:
        made = [WEIGHTS_NAME]
    with new_directory(target) as hidden, Directory.open(hidden) as directory:
        for name, group in zip(made, groups, strict=True):
            _merge_file(loader, group, directory, name, progress)
        if len(groups) > 1:
            weights = {t.fqn: name for name, group in zip(made, groups, strict=True) for t in group}
            total = sum(t.size_bytes for t in tensors)
            listing = {"metadata": {"total_size": total}, "weight_map": weights}
            directory.write(
                INDEX_NAME,
                msgspec.json.format(msgspec.json.encode(listing), indent=1),
                new_owner("merge"),
                mode=SHARED,
            )
            made.append(INDEX_NAME)
    return made


def parent_of_new(target: Path) -> Path:
    """Return the parent directory of ``target``, a file or directory that is to be made.

    Raises:
        UsageError: ``target`` exists, or its parent is not a directory.
    """
    if os.path.lexists(target):
        raise UsageError(f"{target} exists", hint="name a file or directory that does not exist yet")
    parent = target.absolute().parent
    if not parent.is_dir():
        raise UsageError(f"{parent} is not a directory", hint=f"mkdir -p {parent}, or name another place")
    return parent


@contextlib.contextmanager
def new_directory(target: Path) -> Iterator[Path]:
    """Yield a new hidden directory beside ``target``.

    When the ``with`` block ends without an error, the directory is renamed to ``target``, durably.

    Raises:
        UsageError: ``target`` exists, or its parent is not a directory.
        StoreWriteError: the directory cannot be made, or another process has made the target.
    """
    parent = parent_of_new(target)
    with writing(target):
        hidden = parent / f"{TEMPORARY_PREFIX}{new_owner(target.name)}"
        hidden.mkdir()
    try:
        yield hidden
        with writing(target):
            sync_directory(hidden)
            os.rename(hidden, target)  # replaces an empty directory at most
            sync_directory(parent)
    except BaseException:
        shutil.rmtree(hidden, ignore_errors=True)  # the error in progress matters more
        raise


def _merge_file(
    loader: BoxLoader,
    tensors: Sequence[TensorEntry],
    directory: Directory,
    name: str,
    progress: Callable[[int], object],
) -> None:
    """Write the complete tensors ``tensors`` into one new file ``name``."""
    entries = sorted(tensors, key=lambda t: (-DTYPE_SIZE_BYTES[t.dtype], t.fqn))
    head, header = encode_header([(t.fqn, t.dtype, t.shape) for t in entries], {"format": "pt"})
    with directory.temporary(name, new_owner("merge"), replace=False, mode=SHARED) as fd:
        write_at(fd, 0, memoryview(head), directory.path / name)
        for place in header.tensors:
            offset = place.start
            for regions in _slabs(place.shape, DTYPE_SIZE_BYTES[place.dtype]):
                data = loader.bytes_of(place.fqn, place.dtype, place.shape, regions)
                write_at(fd, offset, data, directory.path / name)
                offset += len(data)
                progress(len(data))
    directory.sync()


def _slabs(shape: Shape, item_size_bytes: int) -> Iterator[list[Box]]:
    """Yield the slabs of a tensor, in C order, of at most ``SLAB_SIZE_BYTES`` each. A slab is a list of a few boxes."""
    total, step = prod(shape), max(1, SLAB_SIZE_BYTES // item_size_bytes)
    for start in range(0, total, step):
        yield flat_range_boxes(shape, start, min(start + step, total))
