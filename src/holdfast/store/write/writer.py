"""Writing of one rank's share of a checkpoint, without communication with the other ranks.

Theory. The plan names the parts of boxes that this rank writes. Tensors come first, then the manifest that lists them:
a rank's share exists when the manifest exists. A rank that finds all manifests proves the checkpoint valid from its
files and writes the seal (the file ``SEALED``). Several ranks may write the seal at once, because it is a pure function
of the files.

Invariants:
1. The order on disk: first the contents of all files of the share are durable. Then the files appear (catalogue,
   shards, manifest, copies). Then their names are durable. Only then the seal appears or the share is reported. A loss
   of power in between may leave a manifest without a shard. Such an attempt is not valid.
2. Files that a manifest lists are never replaced by other content. A second save of a finished share compares
   the state with the files, and writes damaged files again.
3. A file has at most one box of a tensor, because torch DCP's reader needs that. The k-th box goes to the k-th file.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import chain
from typing import TYPE_CHECKING, Protocol, TypeAlias, runtime_checkable

import msgspec
import xxhash

from holdfast.core.ids import SaveId
from holdfast.errors import CheckpointInvalid, StateError, StoreError, StoreWriteError
from holdfast.store.backends.interfaces import Attempt, Put
from holdfast.store.backends.location import Place
from holdfast.store.backends.registry import open_store
from holdfast.store.format import manifest as form
from holdfast.store.format.json_values import VALUES_SIZE_BYTES_MAX, encode_values
from holdfast.store.format.manifest import BoxRecord, FileEntry, RankManifest
from holdfast.store.format.safetensors_codec import Header, StoredTensor, dcp_metadata, encode_header
from holdfast.store.layouts.layout import DTYPE_SIZE_BYTES, Box, Catalogue
from holdfast.store.read.validation import read_index, seal_of, share_damage

if TYPE_CHECKING:
    from holdfast.store.layouts.save_plan import SavePlan, WriteItem

BLOCK_SIZE_BYTES = 16 * 1024 * 1024
BLOCK_SIZE_BYTES_MAX = 128 * 1024 * 1024
EXTENT_SIZE_BYTES = 512 * 1024
EXTENT_SIZE_BYTES_MAX = 8 * 1024 * 1024
EXTENTS_OF_SHARE = 2048
"""Number of extents of a share above which larger extents are used.

With small extents a load into another layout reads less. With large extents the manifest of a large share is small.
"""

_Span: TypeAlias = tuple[int, int]
"""File offset of the first byte of an extent, and of the byte after its last."""


class TensorSource(Protocol):
    """A provider of the bytes of the boxes that this rank declared."""

    def view(self, fqn: str, box: Box) -> memoryview:
        """Return the C-contiguous bytes of exactly this box. The bytes must not change before the save returns."""


@runtime_checkable
class ContiguousSource(TensorSource, Protocol):
    """A provider that can give several boxes as one range of bytes, if memory has them in the order of the file."""

    def run(self, items: Sequence[WriteItem]) -> ByteRun | None:
        """Return the bytes of all items as one range; None if memory does not hold the items in their order."""


class ByteRun(Protocol):
    """A range of bytes in memory, in the order of a file. Its last bytes may not have arrived yet."""

    @property
    def size_bytes(self) -> int:
        """Total size of the range in bytes."""

    def piece(self, start: int, stop: int) -> memoryview:
        """Return the bytes ``start`` to ``stop`` of the range, as soon as they have arrived."""


class WrittenShare(msgspec.Struct, frozen=True):
    """The result of writing one share.

    ``sealed``: True if this rank found the shares of all ranks, and has sealed the checkpoint.
    """

    sealed: bool
    size_bytes: int
    duration_s: float
    files: tuple[str, ...]


def write_share(
    root: Place | str,
    save_id: SaveId,
    catalogue: Catalogue,
    plan: SavePlan,
    rank: int,
    source: TensorSource,
    values: Mapping[str, object],
    locals_: Mapping[int, object],
    *,
    threads: int = 1,
    direct: bool = False,
    progress: Callable[[int], object] = int,
) -> WrittenShare:
    """Write the share of ``rank`` in ``plan`` below ``root``, durably, and seal the checkpoint when it is complete.

    A second call for the same save is harmless: a finished share is compared and kept.

    Args:
        root: the path or URL that holds the checkpoints.
        save_id: identity of the save.
        catalogue: all tensors and their holders.
        plan: the plan of the save.
        rank: the rank of the share.
        source: provides the bytes of the boxes.
        values: plain values common to all ranks (see ``json_values.py``).
        locals_: plain values of single ranks: of this rank, and of dead ranks that it writes for.
        threads: number of extents that are hashed and written at the same time.
        direct: write past the page cache. That is less work for a busy host, but a later read comes from the disk. It
            has no effect with several threads, or on a file system without O_DIRECT.
        progress: called with the size in bytes of each piece that was written.

    Returns:
        The size and the files of the share, and whether the checkpoint is sealed.

    Raises:
        StateError: a value cannot be saved (nothing was written), or the plan does not cover everything.
        StoreWriteError: a file cannot be written. No manifest appears, so an incomplete share is never valid.
    """
    started_s = time.perf_counter()
    if not plan.complete:
        raise StateError(f"no complete checkpoint can be written: {plan.why_incomplete()}")
    if rank not in plan.sources:
        raise StateError(f"rank {rank} is not among the writers {list(plan.sources)} of {save_id}")
    common, own = _encode_all(values, locals_)
    groups = files_of(plan.items(rank), catalogue)
    extent = _extent_size_bytes(groups, catalogue)
    with open_store(root).create(save_id.directory()) as directory:
        if not directory.hold():
            raise StoreWriteError(f"{directory.path} is being removed")
        share = _Share(
            directory, save_id, catalogue, source, rank, extent, threads, direct and threads == 1, progress
        )
        size_bytes, names = _put_share(share, groups, plan, common, own)
        sealed = _make_durable(directory, plan, rank)
    return WrittenShare(sealed, size_bytes, time.perf_counter() - started_s, names)


def _put_share(
    share: _Share,
    groups: Sequence[Sequence[WriteItem]],
    plan: SavePlan,
    common: msgspec.Raw,
    own: dict[str, msgspec.Raw],
) -> tuple[int, tuple[str, ...]]:
    """Write the catalogue, shards and manifest of a share, with copies, or compare them with existing files.

    Returns: size in bytes, and names of the share's files.
    """
    directory, rank, name = share.directory, share.rank, form.rank_name(share.rank)
    _put_catalogue(directory, share.catalogue, rank, form.CATALOGUE_NAME)
    if plan.copies > 1:
        _put_catalogue(directory, share.catalogue, rank, form.copy_name(form.CATALOGUE_NAME))
    done = directory.exists(name)
    files, records = share.measure(groups) if done else share.write(groups)
    manifest = RankManifest(
        form.FORMAT_VERSION, share.save_id, rank, share.catalogue.world, share.catalogue.digest, plan.sources,
        plan.copies, share.extent_size_bytes, tuple(files), tuple(records), common, own,
    )  # fmt: skip
    data = form.encode_manifest(manifest)
    _put_manifest(directory, data, rank, name)
    if done and share_damage(directory, manifest):
        share.write(groups)
    if plan.copies > 1:
        _put_manifest(directory, data, rank, form.copy_name(name))
    size_bytes = len(data) + sum(entry.size_bytes for entry in files)
    return size_bytes, (*(entry.name for entry in files), name)


def _make_durable(directory: Attempt, plan: SavePlan, rank: int) -> bool:
    """Publish the files of the share durably. Return True if all shares exist and the checkpoint is sealed."""
    directory.publish()
    there = set(directory.names())  # these are durable after the next line
    directory.sync()
    complete = all(form.rank_name(writer) in there for writer in plan.sources)
    return complete and _seal(directory, f"r{rank:05d}")


def _seal(directory: Attempt, owner: str) -> bool:
    """Publish the seal, if the manifests prove that the checkpoint covers all tensors.

    The name of the seal need not be durable, because the seal contains nothing new.

    Raises:
        StoreWriteError: the checkpoint is not valid, or the seal could not be written.
    """
    try:
        index = read_index(directory)
    except CheckpointInvalid as error:
        raise StoreWriteError(
            f"all shares of {directory.path.name} are written, but: {error.message}"
        ) from error
    data = seal_of(index)
    if not directory.create(form.SEAL_NAME, data, owner, later=True) and (
        _read(directory, form.SEAL_NAME) != data
    ):
        directory.write(form.SEAL_NAME, data, owner)
    directory.publish()
    return True


class _Share:
    """The shard files of one rank, to be written or only hashed."""

    def __init__(
        self,
        directory: Attempt,
        save_id: SaveId,
        catalogue: Catalogue,
        source: TensorSource,
        rank: int,
        extent_size_bytes: int,
        threads: int,
        direct: bool,
        progress: Callable[[int], object],
    ) -> None:
        self.directory = directory
        self.save_id = save_id
        self.catalogue = catalogue
        self.source = source
        self.rank = rank
        self.extent_size_bytes = extent_size_bytes
        self.threads = 1 if directory.in_order else threads
        self.direct = direct
        self.progress = progress

    def write(self, groups: Sequence[Sequence[WriteItem]]) -> tuple[list[FileEntry], list[BoxRecord]]:
        """Write one file per group of items of the plan. Return the manifest's entries for the files and the boxes."""
        files: list[FileEntry] = []
        records: list[BoxRecord] = []
        for index, items in enumerate(groups):
            name = form.shard_name(self.rank, index)
            head, header = self._header(items)
            owner = f"r{self.rank:05d}"
            with self.directory.new_file(
                name, owner, size_bytes=header.size_bytes, direct=self.direct
            ) as put:
                put(0, memoryview(head))
                self._pass_over(index, items, (head, header), put, files, records)
        return files, records

    def measure(self, groups: Sequence[Sequence[WriteItem]]) -> tuple[list[FileEntry], list[BoxRecord]]:
        """Return the manifest's entries, as :meth:`write` does. Hash the bytes in memory, and write nothing."""
        files: list[FileEntry] = []
        records: list[BoxRecord] = []
        for index, items in enumerate(groups):
            self._pass_over(index, items, self._header(items), lambda _offset, _data: None, files, records)
        return files, records

    def _pass_over(
        self,
        index: int,
        items: Sequence[WriteItem],
        head_of_file: tuple[bytes, Header],
        put: Put,
        files: list[FileEntry],
        records: list[BoxRecord],
    ) -> None:
        """Hash every extent of one file and pass it to ``put``. Add the entries of the manifest for this file."""
        tensors = self.catalogue.by_fqn
        head, header = head_of_file
        spans = [_extents(place, self.extent_size_bytes) for place in header.tensors]
        run = self.source.run(items) if self.direct and isinstance(self.source, ContiguousSource) else None
        if run is not None:
            digests = iter(self._beside(list(chain.from_iterable(spans)), header.data_start, run, put))
        else:
            digests = iter(self._piecewise(items, header, spans, put))
        name = form.shard_name(self.rank, index)
        files.append(FileEntry(name, header.size_bytes, len(head), xxhash.xxh3_64_hexdigest(head)))
        for item, place, cuts in zip(items, header.tensors, spans, strict=True):
            records.append(
                BoxRecord(
                    item.fqn,
                    place.dtype,
                    tensors[item.fqn].shape,
                    item.part.offsets,
                    item.part.sizes,
                    index,
                    place.start,
                    tuple(next(digests) for _ in cuts),
                )
            )

    def _piecewise(
        self, items: Sequence[WriteItem], header: Header, spans: Sequence[Sequence[_Span]], put: Put
    ) -> list[str]:
        """Hash and write extent by extent, as many at a time as there are threads. Return the digests in order."""
        extents: list[tuple[int, memoryview]] = []
        for item, place, cuts in zip(items, header.tensors, spans, strict=True):
            data = part_bytes(item, self.source, DTYPE_SIZE_BYTES[place.dtype])
            extents += [(start, data[start - place.start : stop - place.start]) for start, stop in cuts]

        def move(extent: tuple[int, memoryview]) -> str:
            digest = xxhash.xxh3_64_hexdigest(extent[1])
            put(*extent)
            self.progress(len(extent[1]))
            return digest

        if self.threads == 1 or len(extents) < 2:
            return [move(extent) for extent in extents]
        with ThreadPoolExecutor(self.threads, thread_name_prefix="holdfast-write") as pool:
            return list(pool.map(move, extents))

    def _beside(self, spans: Sequence[_Span], first: int, run: ByteRun, put: Put) -> list[str]:
        """Write all data of a file in growing blocks, and hash it in another thread. Return the digests in order.

        One large write keeps the disk busy. After each of many small writes the writer would wait for a processor. A
        block is hashed after its write, but the last block during its write.
        """

        def digest(span: _Span) -> str:
            return xxhash.xxh3_64_hexdigest(run.piece(span[0] - first, span[1] - first))

        found: list[Future[str]] = []
        at, size_bytes = 0, BLOCK_SIZE_BYTES
        with ThreadPoolExecutor(1, thread_name_prefix="holdfast-hash") as pool:
            while at < run.size_bytes:
                end = min(at + size_bytes, run.size_bytes)
                block = run.piece(at, end)
                behind = end if end == run.size_bytes else at
                while len(found) < len(spans) and spans[len(found)][1] - first <= behind:
                    found.append(pool.submit(digest, spans[len(found)]))
                put(first + at, block)
                self.progress(len(block))
                at, size_bytes = end, min(2 * size_bytes, BLOCK_SIZE_BYTES_MAX)
        return [future.result() for future in found]

    def _header(self, items: Sequence[WriteItem]) -> tuple[bytes, Header]:
        tensors = self.catalogue.by_fqn
        shapes = [(item.fqn, tensors[item.fqn].dtype, item.part.sizes) for item in items]
        return encode_header(shapes, dcp_metadata({i.fqn: i.part for i in items}, self.save_id.directory()))


def part_bytes(item: WriteItem, source: TensorSource, item_size_bytes: int) -> memoryview:
    """Return the bytes of the part that ``item`` names, from its box. ``item_size_bytes`` is the size of one element.

    Raises:
        StateError: ``source`` gives another number of bytes than the box has.
    """
    if item.part.numel == 0:
        return memoryview(b"")
    data = memoryview(source.view(item.fqn, item.box)).cast("B")
    size_bytes = item.box.numel * item_size_bytes
    if len(data) != size_bytes:
        raise StateError(
            f"tensor {item.fqn!r}: {len(data)} bytes offered for part {item.box} of {size_bytes}"
        )
    start, stop = item.byte_range(item_size_bytes)
    return data[start:stop]


def files_of(items: Sequence[WriteItem], catalogue: Catalogue) -> list[list[WriteItem]]:
    """Divide the items of a share (boxes to write) among files, so that a file has at most one box of a tensor.

    In a file, tensors with large elements come first, so that all elements are aligned.
    """
    groups: list[list[WriteItem]] = []
    seen: dict[str, int] = {}
    for item in items:
        index = seen.get(item.fqn, 0)
        seen[item.fqn] = index + 1
        if index == len(groups):
            groups.append([])
        groups[index].append(item)
    for group in groups:
        group.sort(key=lambda i: (-DTYPE_SIZE_BYTES[catalogue.by_fqn[i.fqn].dtype], i.fqn))
    return groups


def _extent_size_bytes(groups: Sequence[Sequence[WriteItem]], catalogue: Catalogue) -> int:
    """Return the size of an extent in bytes: small, unless the share would have too many extents."""
    share = sum(i.part.numel * DTYPE_SIZE_BYTES[catalogue.by_fqn[i.fqn].dtype] for g in groups for i in g)
    size_bytes = EXTENT_SIZE_BYTES
    while size_bytes < EXTENT_SIZE_BYTES_MAX and share > EXTENTS_OF_SHARE * size_bytes:
        size_bytes *= 2
    return size_bytes


def _extents(place: StoredTensor, size_bytes: int) -> list[_Span]:
    edges = range(place.start, place.stop, size_bytes)
    return [(start, min(start + size_bytes, place.stop)) for start in edges]


def _encode_all(
    values: Mapping[str, object], locals_: Mapping[int, object]
) -> tuple[msgspec.Raw, dict[str, msgspec.Raw]]:
    common = msgspec.Raw(encode_values(dict(values)))
    own = {
        str(rank): msgspec.Raw(encode_values(value, f"locals of rank {rank}"))
        for rank, value in sorted(locals_.items())
    }
    size_bytes = len(bytes(common)) + sum(len(bytes(data)) for data in own.values())
    if size_bytes > VALUES_SIZE_BYTES_MAX:
        raise StateError(
            f"values and locals take {size_bytes} bytes as JSON; the limit is {VALUES_SIZE_BYTES_MAX}",
            hint="keep large state in tensors",
        )
    return common, own


def _put_catalogue(directory: Attempt, catalogue: Catalogue, rank: int, name: str) -> None:
    """Write the catalogue file ``name`` unless it exists. Raise an error if the existing file differs."""
    data = form.wrap(catalogue.to_json())
    made = directory.create(name, data, f"r{rank:05d}", later=True)
    if not made and _read(directory, name) != data:
        raise StoreWriteError(
            f"{directory.path}: holds another catalogue (the ranks disagree about the layout, or another "
            "job uses the same run id and root)"
        )


def _put_manifest(directory: Attempt, data: bytes, rank: int, name: str) -> None:
    """Write the manifest file ``name`` unless it exists. Raise an error if an existing file is of another save."""
    made = directory.create(name, data, f"r{rank:05d}", later=True)
    if not made and _read(directory, name) != data:
        raise StoreWriteError(
            f"{directory.path}: rank {rank} has already written other content under this save id",
            hint="use another checkpoint directory or run id: an attempt is never overwritten",
        )


def _read(directory: Attempt, name: str) -> bytes:
    try:
        return directory.read(name, form.MANIFEST_SIZE_BYTES_MAX)
    except StoreError as error:
        raise StoreWriteError(error.message) from error
