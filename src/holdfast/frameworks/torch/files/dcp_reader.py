"""The reading of torch DCP directories without executing their content.

Theory. ``.metadata`` is a pickle. It is read as inert records (``pickle_records.py``): no class or function of torch or
Python can be reached from it. The records are then checked like any other untrusted data. Each chunk of a tensor and
each plain value is a ``torch.save`` file inside a ``.distcp`` file. First the zip checksums of such an inner file are
verified, which torch does not do. Then ``torch.load(weights_only=True)`` reads the inner file.

Invariants:
1. Files are opened by plain names inside the directory; no symbolic link is followed.
2. Every element of every tensor came from exactly one chunk; otherwise the directory is refused.
3. Memory holds the metadata and one chunk at a time; the tensors are in a scratch file.
"""

from __future__ import annotations

import io
import os
import zipfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any, NamedTuple

import torch

from holdfast.errors import CheckpointInvalid, StateError
from holdfast.frameworks.torch.files.mmap_scratch import scratch_tensors
from holdfast.frameworks.torch.files.pickle_records import Name, PickleRecord, read_records
from holdfast.frameworks.torch.state.boxes import DTYPES
from holdfast.store.backends.durable_files import Directory, read_at
from holdfast.store.format.safetensors_codec import refuse
from holdfast.store.layouts.box import is_shape
from holdfast.store.layouts.coverage import uncovered
from holdfast.store.layouts.layout import Box, Shape

METADATA_NAME = ".metadata"
METADATA_SIZE_BYTES_MAX = 1024 * 1024 * 1024
VALUE_SIZE_BYTES_MAX = 64 * 1024 * 1024
DEPTH_MAX = 64

_PACKAGE = "torch.distributed.checkpoint."
_DTYPES = {str(dtype): dtype for dtype in DTYPES}
_ADMITTED = frozenset({
    *_DTYPES, _PACKAGE + "metadata.Metadata", _PACKAGE + "metadata.MetadataIndex",
    _PACKAGE + "metadata.TensorStorageMetadata", _PACKAGE + "metadata.BytesStorageMetadata",
    _PACKAGE + "metadata.ChunkStorageMetadata", _PACKAGE + "metadata.TensorProperties",
    _PACKAGE + "metadata.StorageMeta", _PACKAGE + "metadata._MEM_FORMAT_ENCODING",
    _PACKAGE + "filesystem._StorageInfo", "torch.Size", "torch.serialization._get_layout", "pathlib.PosixPath",
    "pathlib._local.PosixPath",
    # Megatron leaves the plan of a save in its metadata. The plan is admitted and ignored.
    _PACKAGE + "planner.SavePlan", _PACKAGE + "planner.WriteItem", _PACKAGE + "planner.WriteItemType",
    _PACKAGE + "planner.TensorWriteData",
})  # fmt: skip
Key = str | int


class Chunk(NamedTuple):
    """A stored piece of a tensor or value: bytes ``start`` to ``start + size_bytes`` of ``file``.

    ``box`` is its region of the tensor; None for a plain value.
    """

    box: Box | None
    file: str
    start: int
    size_bytes: int


class Item(NamedTuple):
    """A leaf of the saved tree: a tensor, or a plain value if ``dtype`` is None."""

    path: tuple[Key, ...]
    dtype: torch.dtype | None
    shape: Shape
    chunks: tuple[Chunk, ...]


def read_dcp(
    folder: Path, scratch: Path, wanted: Callable[[str, Item], bool] = lambda name, item: True
) -> dict[str, Any]:
    """Return the tree of tensors and plain values of a DCP directory.

    Args:
        folder: the DCP directory.
        scratch: directory for a temporary file that holds the tensors.
        wanted: gets the name and the metadata of a leaf; returns True to read the leaf, False to leave it out.

    Raises:
        CheckpointInvalid: the directory is damaged, incomplete, or has content that DCP does not write.
        StoreWriteError: there is no room for the scratch file.
    """
    with Directory.open(folder) as directory:
        items = {name: item for name, item in read_items(directory).items() if wanted(name, item)}
        shapes = {name: (item.dtype, item.shape) for name, item in items.items() if item.dtype is not None}
        tensors = scratch_tensors(shapes, scratch)
        root = _Node()
        for name, item in items.items():
            where = f"{directory.path}: {name}"
            if item.dtype is None:
                value = _load(directory, item.chunks[0], where, VALUE_SIZE_BYTES_MAX)
            else:
                value = tensors[name]
                for chunk in item.chunks:
                    _copy(directory, chunk, value, where)
            _insert(root, item.path, value, where)
    made = _lists(root)
    if not isinstance(made, dict):
        raise CheckpointInvalid(f"{folder}: its tree is a list, not a dict")
    return made


def read_items(directory: Directory) -> dict[str, Item]:
    """Return the leaves that the metadata describes, by name, after all checks.

    Raises:
        CheckpointInvalid: see :func:`read_dcp`.
    """
    where = f"{directory.path / METADATA_NAME}"
    data = directory.read(METADATA_NAME, METADATA_SIZE_BYTES_MAX)
    metadata = read_records(data, _ADMITTED, where)
    try:
        return dict(_items(metadata, where))
    except (ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
        raise CheckpointInvalid(f"{where}: not the metadata of a DCP checkpoint: {error!r}") from error


def check_zip(file: IO[bytes], size_bytes: int, where: str) -> None:
    """Verify the checksums of a ``torch.save`` file; refuse compressed records and records larger than the file.

    Raises:
        CheckpointInvalid: the error names the damaged record.
    """
    try:
        with zipfile.ZipFile(file) as archive:
            entries = archive.infolist()
            if any(e.compress_type != zipfile.ZIP_STORED for e in entries):
                raise CheckpointInvalid(f"{where}: a compressed record, which torch.save never writes")
            if sum(e.file_size for e in entries) > size_bytes:
                raise CheckpointInvalid(f"{where}: its records are larger than the file")
            bad = archive.testzip()
    except (zipfile.BadZipFile, EOFError, ValueError, NotImplementedError, RuntimeError) as error:
        raise CheckpointInvalid(f"{where}: damaged ({error})") from error
    if bad is not None:
        raise CheckpointInvalid(f"{where}: record {bad} does not match its checksum")


def load_plain(file: IO[bytes] | str, where: str, *, mapped: bool = False) -> Any:
    """Return the result of ``torch.load`` for a file that must hold only tensors and plain values.

    Args:
        where: name of the file, for errors.
        mapped: map the file into memory instead of reading it.

    Raises:
        CheckpointInvalid: the file is damaged, or holds other objects, which torch names.
    """
    try:
        return torch.load(file, map_location="cpu", weights_only=True, mmap=mapped)
    except Exception as error:  # torch raises many kinds for damaged or refused content
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        # torch's own message advises weights_only=False. The line that names the object is the useful one.
        named = [line for line in lines if line.startswith("WeightsUnpickler error")]
        if not named:
            why = lines[0].split(". ")[0] if lines else type(error).__name__
            raise CheckpointInvalid(
                f"{where} is truncated or damaged: {why}", hint="copy or save it again"
            ) from error
        raise CheckpointInvalid(
            f"{where}: not only tensors and plain values: {named[0]}",
            hint="load it where it was written and save tensors, numbers, text, lists and dicts only",
        ) from error


def _items(metadata: Any, where: str) -> Iterator[tuple[str, Item]]:
    fields = _state(metadata, "Metadata")
    stored: dict[tuple[str, Shape | None], tuple[str, int, int]] = {}
    for index, info in fields["storage_data"].items():
        at, place = _state(index, "MetadataIndex"), _state(info, "_StorageInfo")
        if type(at["fqn"]) is not str or type(place["relative_path"]) is not str:
            refuse(where, "a place without a name")
        if place.get("transform_descriptors"):
            refuse(where, f"{at['fqn']}: its data are compressed or otherwise transformed")
        offset = None if at.get("offset") is None else _size(at["offset"])
        span = (place["relative_path"], int(place["offset"]), int(place["length"]))
        if span[1] < 0 or span[2] < 0 or stored.setdefault((at["fqn"], offset), span) != span:
            refuse(where, f"{at['fqn']}: impossible or double place of its data")
    paths: Mapping[str, Any] = fields.get("planner_data") or {}
    for name, described in fields["state_dict_metadata"].items():
        path = tuple(paths.get(name, (name,)))
        if not 0 < len(path) <= DEPTH_MAX or any(type(key) not in (str, int) for key in path):
            refuse(where, f"{name!r}: impossible key path")
        if _is(described, "BytesStorageMetadata"):
            place = _place(stored, name, None, where)
            yield name, Item(path, None, (), (Chunk(None, *place),))
        else:
            yield name, _tensor(name, path, _state(described, "TensorStorageMetadata"), stored, where)


def _tensor(
    name: str,
    path: tuple[Key, ...],
    fields: Mapping[str, Any],
    stored: Mapping[tuple[str, Shape | None], tuple[str, int, int]],
    where: str,
) -> Item:
    named = _state(fields["properties"], "TensorProperties")[0]
    dtype = _DTYPES.get(named) if type(named) is Name else None
    shape = _size(fields["size"])
    if dtype is None or not is_shape(shape):
        refuse(where, f"{name}: impossible dtype or shape")
    whole = Box.whole(shape)
    boxes: list[Box] = []
    chunks: list[Chunk] = []
    for record in fields["chunks"]:
        chunk = _state(record, "ChunkStorageMetadata")
        box = Box(_size(chunk["offsets"]), _size(chunk["sizes"]))
        fits = len(box.offsets) == len(box.sizes) == len(shape) and all(n >= 0 for n in box.sizes)
        if not fits or not whole.contains(box):
            refuse(where, f"{name}: chunk {box} is outside of {list(shape)}")
        if box.numel:
            boxes.append(box)
            chunks.append(Chunk(box, *_place(stored, name, box.offsets, where)))
    try:
        missing = uncovered(shape, boxes)
    except StateError as error:
        refuse(where, f"{name}: {error.message}")
    if missing:
        refuse(where, f"{name}: no chunk holds {missing[0]}")
    if sum(box.numel for box in boxes) != whole.numel:
        refuse(where, f"{name}: its chunks overlap")
    return Item(path, dtype, shape, tuple(chunks))


def _place(
    stored: Mapping[tuple[str, Shape | None], tuple[str, int, int]],
    name: str,
    offset: Shape | None,
    where: str,
) -> tuple[str, int, int]:
    found = stored.get((name, offset))
    if found is None:
        refuse(where, f"{name}: nothing says where its data at {offset} are")
    return found


def _copy(directory: Directory, chunk: Chunk, target: torch.Tensor, where: str) -> None:
    """Read one chunk into its region of the tensor ``target``."""
    assert chunk.box is not None
    data = _load(directory, chunk, where, None)
    box = chunk.box
    if not isinstance(data, torch.Tensor) or tuple(data.shape) != box.sizes or data.dtype != target.dtype:
        raise CheckpointInvalid(f"{where}: the data of {box} are not a {target.dtype} of {list(box.sizes)}")
    for dim, (offset, size) in enumerate(zip(box.offsets, box.sizes, strict=True)):
        target = target.narrow(dim, offset, size)
    target.copy_(data)


def _load(directory: Directory, chunk: Chunk, where: str, size_bytes_max: int | None) -> Any:
    """Return the object stored in a chunk."""
    fd, total = directory.open_read(chunk.file)
    try:
        if chunk.start + chunk.size_bytes > total:
            raise CheckpointInvalid(
                f"{where}: {chunk.file} ends at byte {total}, before {chunk.start + chunk.size_bytes}"
            )
        if size_bytes_max is not None and chunk.size_bytes > size_bytes_max:
            raise CheckpointInvalid(f"{where}: a value of {chunk.size_bytes} bytes")
        data = bytearray(chunk.size_bytes)
        read_at(fd, chunk.start, [memoryview(data)], directory.path / chunk.file)
    finally:
        os.close(fd)
    file = io.BytesIO(data)
    check_zip(file, chunk.size_bytes, f"{where} in {chunk.file}")
    file.seek(0)
    return load_plain(file, where)


def _is(record: Any, kind: str) -> bool:
    return isinstance(record, PickleRecord) and record.name.endswith(f".{kind}")


def _state(record: Any, kind: str) -> Any:
    """Return the state of a record of class ``kind``: a dict, or a tuple for classes with their own pickle form."""
    if not _is(record, kind):
        raise ValueError(f"something else where a {kind} belongs")
    return record.state


def _size(record: Any) -> Shape:
    """Return the integers of a ``torch.Size`` record."""
    if not _is(record, "Size") or len(record.args) != 1:
        raise ValueError("something else where a torch.Size belongs")
    size = tuple(record.args[0])
    if any(type(n) is not int for n in size):
        raise ValueError("a torch.Size of other things than integers")
    return size


class _Node(dict[Key, Any]):
    """A branch of the tree. It is a separate class, because a leaf may be a plain dict."""


def _insert(root: _Node, path: tuple[Key, ...], value: Any, where: str) -> None:
    """Put a leaf into the tree at its key path."""
    node = root
    for key in path[:-1]:
        node = node.setdefault(key, _Node())
        if not isinstance(node, _Node):
            raise CheckpointInvalid(f"{where}: its key path leads through another value")
    if path[-1] in node:
        raise CheckpointInvalid(f"{where}: two values at one key path")
    node[path[-1]] = value


def _lists(node: Any) -> Any:
    """Return the tree, with a list for each branch whose keys are the numbers 0 to n - 1."""
    if not isinstance(node, _Node):
        return node
    made = {key: _lists(item) for key, item in node.items()}
    return [made[n] for n in range(len(made))] if made and made.keys() == set(range(len(made))) else made
