"""Validation of a checkpoint: a pure function of the files in its directory.

Theory. A checkpoint is valid under three conditions. The manifest of every rank that takes part exists. All manifests
have the same save id and the same catalogue. The boxes in intact files cover every tensor of the catalogue. The seal
is only a cached answer: it is neither needed nor trusted. The shallow check reads manifests, file sizes and headers.
The deep check also hashes every extent (piece of a file).

Invariants:
1. Deleting, truncating or swapping any file that the catalogue needs makes the answer "invalid", with the file named.
2. Damage that copies can replace (``copies`` > 1) is listed, and the checkpoint stays valid. This holds for extents,
   files, manifests and the catalogue.
3. No file outside the directory is touched and no link followed, whatever the manifests contain.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import pairwise
from typing import TypeVar

import msgspec
import xxhash

from holdfast.core.ids import SaveId
from holdfast.errors import CheckpointInvalid, StateError
from holdfast.store.backends.interfaces import Attempt, SourceFile
from holdfast.store.backends.location import Place, place_of
from holdfast.store.backends.registry import open_attempt
from holdfast.store.format import manifest as form
from holdfast.store.format.manifest import BoxRecord, FileEntry, RankManifest
from holdfast.store.format.safetensors_codec import HEADER_SIZE_BYTES_MAX, decode_header
from holdfast.store.layouts.coverage import missing
from holdfast.store.layouts.layout import DTYPE_SIZE_BYTES, Box, Catalogue, flat_regions
from holdfast.text import noun_of

Progress = Callable[[int], object]
T = TypeVar("T")
R = TypeVar("R")
_BAD_HEADER = ": header does not match its digest (flipped, or a file of another save)"


def _quiet(_size_bytes: int) -> None:
    """Ignore a report of progress."""


class StoredBox(msgspec.Struct, frozen=True):
    """One box of a tensor in a shard file: the rank that wrote it, the file name, and its record from the manifest."""

    rank: int
    name: str
    extent_size_bytes: int
    record: BoxRecord

    def extents(self) -> Iterator[tuple[int, int, str]]:
        """Yield (file offset, length in bytes, digest) of each extent of the box."""
        stop = self.record.start + self.record.size_bytes
        for n, digest in enumerate(self.record.digests):
            start = self.record.start + n * self.extent_size_bytes
            yield start, min(self.extent_size_bytes, stop - start), digest

    def regions(self, start: int, size_bytes: int) -> list[Box]:
        """Return the boxes whose elements a byte range of the file holds, in the coordinates of the complete tensor.

        ``start`` is a file offset inside the stored box. The result is in the order of the bytes.
        """
        record, item = self.record, DTYPE_SIZE_BYTES[self.record.dtype]
        if size_bytes == record.size_bytes:
            return [record.box]
        first = (start - record.start) // item
        return flat_regions(record.box, first, first + size_bytes // item)


class _Unfinished(CheckpointInvalid):
    """The error for an attempt that lacks a rank's share: the save is in progress, or its writers died."""


class Index(msgspec.Struct, frozen=True):
    """The cross-checked content of all JSON files of a valid checkpoint."""

    save_id: SaveId
    catalogue: Catalogue
    manifests: dict[int, RankManifest]
    digests: dict[str, str]
    boxes: dict[str, tuple[StoredBox, ...]]
    damage: tuple[str, ...]
    size_bytes: int

    @property
    def copies(self) -> int:
        """The number of ranks that write each box in this save (fewer if the box has fewer holders)."""
        return next(iter(self.manifests.values())).copies


class Validity(msgspec.Struct, frozen=True):
    """The result of :func:`inspect`. ``reason`` names the first broken rule; ``damage`` lists all damage."""

    path: str
    valid: bool
    reason: str = ""
    step: int = -1
    save_id: SaveId | None = None
    sealed: bool = False
    deep: bool = False
    world: int = 0
    writers: tuple[int, ...] = ()
    copies: int = 0
    tensors: int = 0
    size_bytes: int = 0
    damage: tuple[str, ...] = ()
    unfinished: bool = False  # not valid, and never was: a share was not finished
    denied: bool = False  # not known: this process has no right to read it

    @property
    def name(self) -> str:
        """Directory name of the attempt."""
        return place_of(self.path).name


def inspect(
    path: Place | str, deep: bool = False, *, threads: int = 2, progress: Progress = _quiet
) -> Validity:
    """Judge the checkpoint at ``path`` from its files alone. An invalid checkpoint raises no error.

    Args:
        path: the checkpoint.
        deep: also read every tensor and compare its digests.
        threads: extents read and hashed at the same time (deep only).
        progress: called with the size in bytes of each extent after it was checked (deep only).

    Returns:
        Whether the checkpoint is valid, with the reason and the damage.

    Raises:
        StoreUnreachable: the files cannot be read now.
        StoreDenied: this process has no right to read the files.
    """
    step = (form.attempt_key(place_of(path).name) or (-1,))[0]
    try:
        with open_attempt(path) as directory:
            if not deep:
                return judge(directory, read_index(directory))
            if not directory.hold():  # protects it during the long read
                raise CheckpointInvalid(f"{directory.path}: is being removed")
            index = read_index(directory)
            more = (*check_copies(directory, index), *check_contents(directory, index, threads, progress))
            return msgspec.structs.replace(judge(directory, index, more), deep=True)
    except CheckpointInvalid as error:
        unfinished, why = isinstance(error, _Unfinished), error.message
        return Validity(str(path), False, why, step, deep=deep, damage=(why,), unfinished=unfinished)


def judge(directory: Attempt, index: Index, more: Sequence[str] = ()) -> Validity:
    """Return the result "valid" for a checkpoint whose index was read without an error.

    ``more`` is further damage to list. Copies can replace the damaged data.
    """
    sealed, broken = _seal(directory, index)
    some = next(iter(index.manifests.values()))
    return Validity(
        str(directory.path), True, "", index.save_id.step, index.save_id, sealed, False, some.world, some.writers,
        some.copies, len(index.catalogue.tensors), index.size_bytes, (*index.damage, *more, *broken),
    )  # fmt: skip


def read_index(directory: Attempt, *, headers: bool = True) -> Index:
    """Read and cross-check all JSON files, file sizes and headers of a checkpoint.

    Args:
        directory: the checkpoint.
        headers: if True, the boxes of a file with a damaged header are ignored. Otherwise they are used, because the
            data may be intact (see ``repair.py``).

    Returns:
        The content of the JSON files, and the damage.

    Raises:
        CheckpointInvalid: the first broken rule, with the file's path.
    """
    where = directory.path
    names = directory.names()
    missing_share = CheckpointInvalid if form.SEAL_NAME in names else _Unfinished
    damage: list[str] = []
    found = (form.rank_of_name(name.removeprefix(form.COPY_PREFIX)) for name in names)
    ranks = sorted({rank for rank in found if rank is not None})
    if not ranks:
        raise missing_share(f"{where}: no rank has finished its share")
    catalogue = _read_json(directory, form.CATALOGUE_NAME, form.decode_catalogue, damage)
    manifests: dict[int, RankManifest] = {}
    digests: dict[str, str] = {}
    for rank, (read, noted) in zip(
        ranks, _each(directory, partial(_read_manifest, directory), ranks), strict=True
    ):
        manifests[rank], digests[form.rank_name(rank)] = read
        damage += noted
    first = next(iter(manifests.values()))
    for rank, manifest in manifests.items():
        _check_agreement(rank, manifest, first, catalogue, directory)
    for rank in first.writers:
        if rank not in manifests:
            raise missing_share(
                f"{where / form.rank_name(rank)}: missing; rank {rank} did not finish its share"
            )
    boxes: dict[str, list[StoredBox]] = {}
    entries = [entry for manifest in manifests.values() for entry in manifest.files]
    looks = _each(directory, partial(_what_is_wrong, directory), entries)
    broken = {entry.name: line for entry, line in zip(entries, looks, strict=True)}
    for rank, manifest in manifests.items():
        lines = [broken[entry.name] for entry in manifest.files]
        damage += filter(None, lines)
        intact = [not line or (not headers and line.endswith(_BAD_HEADER)) for line in lines]
        place = where / form.rank_name(rank)
        for record in manifest.tensors:
            _check_known(record, catalogue, place)
            if intact[record.file]:
                stored = StoredBox(rank, manifest.files[record.file].name, manifest.extent_size_bytes, record)
                boxes.setdefault(record.fqn, []).append(stored)
    # A load takes the boxes one by one. In C order, the regions that are still uncovered stay few.
    sorted_boxes = {fqn: tuple(sorted(found, key=lambda s: s.record.box)) for fqn, found in boxes.items()}
    index = Index(
        first.save_id, catalogue, manifests, digests, sorted_boxes, tuple(damage),
        sum(entry.size_bytes for m in manifests.values() for entry in m.files),
    )  # fmt: skip
    check_coverage(index, where, {})
    return index


def _read_json(directory: Attempt, name: str, decode: Callable[[bytes, str], T], damage: list[str]) -> T:
    """Return one decoded JSON file. If it is damaged or missing, decode its copy and add a line to ``damage``."""
    limit = form.MANIFEST_SIZE_BYTES_MAX
    try:
        return decode(directory.read(name, limit), str(directory.path / name))
    except CheckpointInvalid as error:
        copy = form.copy_name(name)
        if not directory.exists(copy):
            raise
        try:
            decoded = decode(directory.read(copy, limit), str(directory.path / copy))
        except CheckpointInvalid:
            raise error from None
        damage.append(error.message)
        return decoded


def json_files(index: Index) -> Iterator[tuple[str, bytes]]:
    """Yield name and correct content of each JSON file except the seal: an original, then its copy (if any)."""
    originals = [(form.CATALOGUE_NAME, form.wrap(index.catalogue.to_json()))]
    for rank, manifest in index.manifests.items():
        originals.append((form.rank_name(rank), form.encode_manifest(manifest)))
    for name, data in originals:
        yield name, data
        if index.copies > 1:
            yield form.copy_name(name), data


def check_copies(directory: Attempt, index: Index) -> tuple[str, ...]:
    """Return a line of text per damaged copy of a JSON file; empty if the checkpoint has no copies."""
    found: list[str] = []
    for name, data in json_files(index):
        if name.startswith(form.COPY_PREFIX):
            try:
                if directory.read(name, form.MANIFEST_SIZE_BYTES_MAX) != data:
                    found.append(
                        f"{directory.path / name}: is no copy of {name.removeprefix(form.COPY_PREFIX)}"
                    )
            except CheckpointInvalid as error:
                found.append(error.message)
    return tuple(found)


def seal_of(index: Index) -> bytes:
    """Return the correct content of the seal file of this checkpoint."""
    return form.encode_seal(index.save_id, index.catalogue.digest, index.digests)


def _seal(directory: Attempt, index: Index) -> tuple[bool, list[str]]:
    """Return whether the checkpoint has a valid seal, and lines about errors in the seal (none if no seal exists)."""
    if not directory.exists(form.SEAL_NAME):
        return False, []
    try:
        if directory.read(form.SEAL_NAME, form.MANIFEST_SIZE_BYTES_MAX) == seal_of(index):
            return True, []
    except CheckpointInvalid as error:
        return False, [error.message]
    return False, [f"{directory.path / form.SEAL_NAME}: does not match the manifests"]


def check_coverage(
    index: Index, where: Place, bad: Mapping[int, Mapping[int, str]], names: Collection[str] | None = None
) -> None:
    """Raise an error if the intact extents do not cover every tensor of the catalogue.

    Args:
        index: the content of the JSON files.
        where: the checkpoint, for messages.
        bad: damaged extents, by ``id()`` of the ``StoredBox``: a dict from the number of an extent to a line about it.
        names: names of the tensors that count; None means all.

    Raises:
        CheckpointInvalid: the error names the damage that leaves a region uncovered, or the region.
    """
    absent = index.catalogue.absent
    if absent:
        ranks = f"{noun_of(len(absent), 'rank')} {', '.join(map(str, absent[:8]))}"
        raise CheckpointInvalid(f"{where / form.CATALOGUE_NAME}: no layout of {ranks}")
    for tensor in index.catalogue.tensors:
        if names is not None and tensor.fqn not in names:
            continue
        boxes: list[Box] = []
        lines: list[str] = []
        for stored in index.boxes.get(tensor.fqn, ()):
            wrong = bad.get(id(stored))
            if wrong is None:
                boxes.append(stored.record.box)
            else:
                lines += wrong.values()
                for n, (start, size_bytes, _) in enumerate(stored.extents()):
                    boxes += () if n in wrong else stored.regions(start, size_bytes)
        try:
            holes = missing(tensor.shape, boxes)
        except StateError as error:
            raise CheckpointInvalid(f"{where}: tensor {tensor.fqn!r}: {error.message}") from error
        if holes:
            cause = next(iter((*lines, *index.damage)), "")
            raise CheckpointInvalid(
                f"{where}: no intact copy of {tensor.fqn}{holes[0]}" + (f" ({cause})" if cause else "")
            )


def check_contents(
    directory: Attempt,
    index: Index,
    threads: int,
    progress: Progress = _quiet,
    names: Collection[str] | None = None,
) -> tuple[str, ...]:
    """Check the header of every intact file and hash every extent. Return the damage.

    Args:
        directory: the checkpoint.
        index: the content of its JSON files.
        threads: extents read and hashed at the same time.
        progress: called with the size in bytes of each extent.
        names: names of the tensors whose extents are hashed; None means all.

    Raises:
        CheckpointInvalid: the intact extents do not cover the catalogue.
    """
    by_file: dict[str, list[StoredBox]] = {}
    for stored in (s for boxes in index.boxes.values() for s in boxes):
        by_file.setdefault(stored.name, []).append(stored)
    damage: list[str] = []
    bad: dict[int, Mapping[int, str]] = {}
    with ThreadPoolExecutor(threads, thread_name_prefix="holdfast-verify") as pool:
        for name, boxes in sorted(by_file.items()):
            wanted = [s for s in boxes if names is None or s.record.fqn in names]
            with directory.open_file(name) as file:
                damage += _check_header(file, boxes)
                checks = pool.map(partial(bad_extents, file, progress=progress), wanted)
                for stored, found in zip(wanted, checks, strict=True):
                    damage += found.values()
                    if found:
                        bad[id(stored)] = found
    if damage:
        check_coverage(msgspec.structs.replace(index, damage=tuple(damage)), directory.path, bad, names)
    return tuple(damage)


def share_damage(directory: Attempt, manifest: RankManifest) -> list[str]:
    """Read the shard files of one rank completely. Return a line of text about each damage."""
    damage: list[str] = []
    for number, entry in enumerate(manifest.files):
        if wrong := _what_is_wrong(directory, entry):
            damage.append(wrong)
        else:
            with directory.open_file(entry.name) as file:
                for record in manifest.tensors:
                    if record.file == number:
                        stored = StoredBox(manifest.rank, entry.name, manifest.extent_size_bytes, record)
                        damage += bad_extents(file, stored).values()
    return damage


def bad_extents(file: SourceFile, stored: StoredBox, progress: Progress = _quiet) -> dict[int, str]:
    """Read and hash the extents of one stored box. Return a line of text about each bad extent, by its index."""
    found: dict[int, str] = {}
    buffer = memoryview(bytearray(min(stored.extent_size_bytes, stored.record.size_bytes)))
    for n, (start, size_bytes, digest) in enumerate(stored.extents()):
        try:
            file.read_at(start, [buffer[:size_bytes]])
        except CheckpointInvalid as error:
            found[n] = error.message
            continue
        if xxhash.xxh3_64_hexdigest(buffer[:size_bytes]) != digest:
            found[n] = bad_extent(file.path, stored.record, start, size_bytes)
        progress(size_bytes)
    return found


def bad_extent(path: Place, record: BoxRecord, start: int, size_bytes: int) -> str:
    """Return the line of text about an extent that does not match its digest."""
    return f"{path}: bytes {start}:{start + size_bytes} of {record.fqn}{record.box} do not match their digest"


def _check_agreement(
    rank: int, manifest: RankManifest, first: RankManifest, catalogue: Catalogue, directory: Attempt
) -> None:
    """Check that a manifest agrees with its file name, the first manifest, the catalogue and the directory name."""
    where = directory.path / form.rank_name(rank)
    key = form.attempt_key(directory.path.name)
    if manifest.rank != rank:
        raise CheckpointInvalid(f"{where}: is the manifest of rank {manifest.rank}")
    if manifest.save_id != first.save_id or (key and manifest.save_id.directory() != directory.path.name):
        raise CheckpointInvalid(f"{where}: belongs to another save ({manifest.save_id.directory()})")
    if manifest.catalogue != catalogue.digest:
        raise CheckpointInvalid(f"{where}: was written for another catalogue")
    if (manifest.world, manifest.copies, manifest.writers) != (catalogue.world, first.copies, first.writers):
        raise CheckpointInvalid(f"{where}: disagrees with {form.rank_name(first.rank)} about the writers")
    if any(a >= b for a, b in pairwise(manifest.writers)) or not catalogue.ranks.issuperset(manifest.writers):
        raise CheckpointInvalid(f"{where}: its writers are not ranks of the catalogue, ascending")


def _check_known(record: BoxRecord, catalogue: Catalogue, where: Place) -> None:
    tensor = catalogue.by_fqn.get(record.fqn)
    if tensor is None or (tensor.dtype, tensor.shape) != (record.dtype, record.shape):
        raise CheckpointInvalid(f"{where}: tensor {record.fqn!r} is not that of the catalogue")


def _each(directory: Attempt, function: Callable[[T], R], items: Sequence[T]) -> Iterator[R]:
    """Yield the result of ``function`` for each item. For a remote store, several calls run at the same time."""
    if directory.parallel == 1 or len(items) < 2:
        yield from map(function, items)
        return
    with ThreadPoolExecutor(directory.parallel, thread_name_prefix="holdfast-look") as pool:
        yield from pool.map(function, items)


def _read_manifest(directory: Attempt, rank: int) -> tuple[tuple[RankManifest, str], list[str]]:
    """Return the manifest of a rank with its digest, and error lines.

    If the manifest's file is damaged or missing, the manifest is read from the copy of the file, and one line says so.
    """
    damage: list[str] = []
    return _read_json(directory, form.rank_name(rank), form.decode_manifest, damage), damage


def _what_is_wrong(directory: Attempt, entry: FileEntry) -> str:
    """Return a line about the damage of a shard file's size or header; empty if both are intact."""
    path = directory.path / entry.name
    try:
        with directory.open_file(entry.name) as file:
            if file.size_bytes != entry.size_bytes:
                return f"{path}: {file.size_bytes} bytes in place of {entry.size_bytes}"
            if entry.header_size_bytes > HEADER_SIZE_BYTES_MAX:
                return f"{path}: header of {entry.header_size_bytes} bytes"
            head = bytearray(entry.header_size_bytes)
            file.read_at(0, [memoryview(head)])
    except CheckpointInvalid as error:
        return error.message
    if xxhash.xxh3_64_hexdigest(head) != entry.header_digest:
        return f"{path}{_BAD_HEADER}"
    return ""


def _check_header(file: SourceFile, boxes: Sequence[StoredBox]) -> list[str]:
    """Check that the safetensors header names the same tensors as the manifest: other programs read only the header."""
    prefix = bytearray(8)
    try:
        file.read_at(0, [memoryview(prefix)])
        length = min(8 + int.from_bytes(prefix, "little"), file.size_bytes, HEADER_SIZE_BYTES_MAX)
        head = bytearray(length)
        file.read_at(0, [memoryview(head)])
        header = decode_header(bytes(head), file.size_bytes, str(file.path))
    except CheckpointInvalid as error:
        return [error.message]
    found = {(t.fqn, t.dtype, t.shape, t.start) for t in header.tensors}
    wanted = {(s.record.fqn, s.record.dtype, s.record.sizes, s.record.start) for s in boxes}
    return [] if found == wanted else [f"{file.path}: header and manifest disagree about its tensors"]
