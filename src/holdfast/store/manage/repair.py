"""Repair of a damaged checkpoint from its intact parts.

Theory. A manifest determines every byte of a shard file: the header follows from it, and each extent (piece of a file)
has a digest. So a damaged header is written again, and a damaged extent is replaced by a copy of the same elements in
another file. The result has the recorded digests, so a repaired file is the original file. The catalogue and the
manifests cannot be derived from other files: each has a copy if the save promises copies (``copies`` > 1). The seal
follows from the manifests.

Not repairable:
- an extent that no other file holds: with ``copies`` = 1, every extent that one rank alone wrote;
- a catalogue or manifest whose copy is damaged or does not exist.

Invariants:
1. Nothing is written unless every missing part was found and verified.
2. A file is replaced whole, by its original content.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec
import xxhash

from holdfast.errors import CheckpointInvalid
from holdfast.store.backends.durable_files import new_owner
from holdfast.store.backends.interfaces import Attempt
from holdfast.store.backends.location import Place
from holdfast.store.backends.registry import open_attempt
from holdfast.store.format import manifest as form
from holdfast.store.format.manifest import FileEntry, RankManifest
from holdfast.store.format.safetensors_codec import HEADER_SIZE_BYTES_MAX, dcp_metadata, encode_header
from holdfast.store.read.load import BoxLoader
from holdfast.store.read.validation import Index, StoredBox, check_contents, json_files, read_index, seal_of

THREADS = 2


class Repaired(msgspec.Struct, frozen=True):
    """The result of a repair.

    Attributes:
        rebuilt: names of the files that were rebuilt (in a dry run: would be).
        sealed: True if the checkpoint is now complete and sealed.
    """

    rebuilt: tuple[str, ...]
    sealed: bool


class _Plan(NamedTuple):
    """A shard file to write again: its entry in the manifest, the bytes of its header, and its boxes."""

    entry: FileEntry
    head: bytes
    boxes: tuple[StoredBox, ...]


def repair(path: Place, *, dry_run: bool = False) -> Repaired:
    """Rebuild every damaged or missing file of a checkpoint.

    Args:
        path: the checkpoint.
        dry_run: read everything and write nothing.

    Returns:
        The names of the rebuilt files, and whether the checkpoint is sealed.

    Raises:
        CheckpointInvalid: the intact parts do not suffice; nothing was changed.
        StoreWriteError: a file cannot be written.
    """
    with open_attempt(path) as directory:
        if not directory.hold():
            raise CheckpointInvalid(f"{directory.path}: is being removed")
        index = read_index(directory, headers=False)
        damage = (*index.damage, *check_contents(directory, index, THREADS))
        plans = [
            _plan(directory, manifest, number)
            for manifest in index.manifests.values()
            for number, entry in enumerate(manifest.files)
            if any(f"{directory.path / entry.name}:" in line for line in damage)
        ]
        texts = (*json_files(index), (form.SEAL_NAME, seal_of(index)))
        other = [(name, data) for name, data in texts if not _holds(directory, name, data)]
        names = (*(plan.entry.name for plan in plans), *(name for name, _ in other))
        if dry_run or not names:
            return Repaired(names, not names)
        owner = new_owner("repair")
        for plan in plans:
            _rebuild(directory, index, plan, owner)
            directory.publish()
        directory.sync()
        for name, data in other:
            directory.write(name, data, owner)
        left = check_contents(directory, read_index(directory), THREADS)
        if left:
            raise CheckpointInvalid(f"after the repair: {left[0]}")
    return Repaired(names, True)


def _holds(directory: Attempt, name: str, data: bytes) -> bool:
    """Return True if the file ``name`` has exactly the content ``data``."""
    try:
        return directory.read(name, form.MANIFEST_SIZE_BYTES_MAX) == data
    except CheckpointInvalid:
        return False


def _plan(directory: Attempt, manifest: RankManifest, number: int) -> _Plan:
    """Return header and boxes of one shard file, as a plan to write the file again.

    Raises:
        CheckpointInvalid: the header is damaged, and this version of Holdfast would write another header.
    """
    entry = manifest.files[number]
    records = [record for record in manifest.tensors if record.file == number]
    head = _own_head(directory, entry)
    if xxhash.xxh3_64_hexdigest(head) != entry.header_digest:
        head, _ = encode_header(
            [(r.fqn, r.dtype, r.sizes) for r in records],
            dcp_metadata({r.fqn: r.box for r in records}, manifest.save_id.directory()),
        )
    if xxhash.xxh3_64_hexdigest(head) != entry.header_digest:
        raise CheckpointInvalid(
            f"{directory.path / entry.name}: its header is damaged and was written by another version",
            hint="repair it with the version that wrote it",
        )
    boxes = tuple(StoredBox(manifest.rank, entry.name, manifest.extent_size_bytes, r) for r in records)
    return _Plan(entry, head, boxes)


def _own_head(directory: Attempt, entry: FileEntry) -> bytes:
    """Return the header bytes of the existing shard file; empty if they cannot be read."""
    head = bytearray(min(entry.header_size_bytes, HEADER_SIZE_BYTES_MAX))
    try:
        with directory.open_file(entry.name) as file:
            file.read_at(0, [memoryview(head)])
    except CheckpointInvalid:
        return b""
    return bytes(head)


def _rebuild(directory: Attempt, index: Index, plan: _Plan, owner: str) -> None:
    """Write one shard file again: each extent (piece of the file) from an intact copy."""
    path = directory.path / plan.entry.name
    loader = BoxLoader(directory, index, THREADS)
    with directory.new_file(plan.entry.name, owner, size_bytes=plan.entry.size_bytes) as put:
        put(0, memoryview(plan.head))
        for stored in plan.boxes:
            record = stored.record
            for start, size_bytes, digest in stored.extents():
                regions = stored.regions(start, size_bytes)
                data = loader.bytes_of(record.fqn, record.dtype, record.shape, regions)
                if xxhash.xxh3_64_hexdigest(data) != digest:
                    raise CheckpointInvalid(f"{path}: the copies of {record.fqn}{record.box} differ")
                put(start, data)
