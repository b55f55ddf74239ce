"""Loading of any stored layout into any other, directly into the caller's memory, with every byte verified.

Theory. A target is a box of a tensor and a buffer for it. The stored boxes of that tensor are intersected with the
target. Each stored box is read in extents (pieces of a file), because a digest covers an extent. An extent whose bytes
are contiguous in the target is read directly into it. Any other extent is read into a scratch buffer and *scattered*:
its elements are copied to the target. Adjacent extents are planned, read and scattered together, and hashed while they
are in the processor's cache. An extent with a wrong digest does not count, and its elements are read from another copy.
Intact extents of the same box are still used. Bytes in the page cache are read without waiting, in small pieces. Files
are not mapped, because each page would be mapped and unmapped for a single read.

Invariants:
1. When a load returns, every element of every target came from an extent whose digest matched.
2. When a load raises an error, the targets hold garbage and must not be used.
3. Extra memory: one scratch buffer of one batch per thread, and the manifests.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import pairwise

import msgspec
import numpy as np
import xxhash

from holdfast.core.ids import SaveId
from holdfast.errors import CheckpointInvalid, CheckpointMismatch, StateError
from holdfast.store.backends.interfaces import Attempt, Cached, SourceFile
from holdfast.store.backends.local_store import THREADS_MAX, LocalAttempt, threads_of_rank
from holdfast.store.backends.location import Place
from holdfast.store.backends.registry import open_attempt
from holdfast.store.format.json_values import decode_mapping
from holdfast.store.layouts.layout import DTYPE_SIZE_BYTES, Box, Catalogue, Shape, subtract
from holdfast.store.layouts.value_sources import speakers
from holdfast.store.read.load_plan import LoadTarget as LoadTarget
from holdfast.store.read.load_plan import Read, batches_of, in_order, reads_of
from holdfast.store.read.validation import Index, StoredBox, bad_extent, read_index

# The bytes of a larger batch would leave the processor's cache before they are hashed.
BATCH_SIZE_BYTES = 4 * 1024 * 1024
PIECE_SIZE_BYTES = 1024 * 1024  # for bytes in the page cache: fits into the private cache of a core
REMOTE_BATCH_SIZE_BYTES = 16 * 1024 * 1024  # a request to another machine takes long, whatever its size
FILES_OPEN_MAX = 64
DIFFERENCES_SHOWN = 10
_WORDS: dict[int, np.dtype[np.unsignedinteger]] = {
    1: np.dtype(np.uint8), 2: np.dtype(np.uint16), 4: np.dtype(np.uint32), 8: np.dtype(np.uint64)
}  # fmt: skip


class LoadReport(msgspec.Struct, frozen=True):
    """The result of a load. ``healed`` is the damage that other copies replaced.

    Attributes:
        missing: names of targets that are not in the checkpoint, and were left untouched.
        mismatched: names of targets with another shape or dtype in the checkpoint, which were left untouched.
        unexpected: names of tensors of the checkpoint that have no target.

    These three lists only have names that the caller allowed to differ.
    """

    save_id: SaveId
    step: int
    size_bytes: int
    read_size_bytes: int
    duration_s: float
    healed: tuple[str, ...]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...] = ()
    mismatched: tuple[str, ...] = ()

    @property
    def untouched(self) -> frozenset[str]:
        """Names of the targets that keep their old content."""
        return frozenset((*self.missing, *self.mismatched))


class _Bad(msgspec.Struct):
    """A read whose bytes are damaged or cannot be read, and one line of text about the reason."""

    read: Read
    why: str


@dataclass(frozen=True)
class Opened:
    """A checkpoint that is protected from removal, and its decoded JSON files.

    The functions of this module accept it in place of a path, so that the JSON files are read only once.
    """

    directory: Attempt
    index: Index

    def __str__(self) -> str:
        return str(self.directory.path)


def load_into(
    path: Place | str | Opened,
    targets: Iterable[LoadTarget],
    *,
    known: Iterable[str] = (),
    missing: Iterable[str] = (),
    unexpected: Iterable[str] = (),
    optional: Sequence[str] = (),
    strict: bool = True,
    first: Collection[str] = (),
    check: Callable[[Collection[str]], None] | None = None,
    threads: int = 0,
) -> LoadReport:
    """Fill the targets (boxes of tensors with a buffer each) from a checkpoint.

    Args:
        path: the checkpoint.
        targets: the boxes of this rank. Together with ``known`` they must name every tensor of the checkpoint.
        known: names of tensors that other ranks load (pipeline stages, experts).
        missing, unexpected: names of plain values that only the caller has (``missing``) or only the checkpoint has
            (``unexpected``). They count like tensors.
        optional: name patterns (``fnmatch``). Matching names may be missing among the targets or in the checkpoint, or
            differ in shape or dtype.
        strict: if True, names without such a pattern must be among the targets and in the checkpoint. Otherwise they
            may be missing, but not differ in shape or dtype.
        first: names of targets to fill before all others.
        check: called after ``first`` is filled, with the names of targets that will not be filled. An error in this
            call ends the load.
        threads: number of threads that read; 0 means the host's cores divided among its ranks (a few for a remote
            store).

    Raises:
        CheckpointInvalid: a file is damaged or missing; the error names it. The targets hold garbage.
        CheckpointMismatch: names, shapes or dtypes differ. The error lists the first differences. Nothing was loaded.
        StateError: a buffer does not fit its box.
    """
    started_s = time.perf_counter()
    wanted = list(targets)
    for target in wanted:
        _check_target(target)
    with opened(path) as source:
        directory, index = source.directory, source.index
        found = _compare(index.catalogue, wanted, known)
        found.missing += missing
        found.unexpected += unexpected
        found.refuse(optional, strict, directory.path)
        filled = [t for t in wanted if t.fqn not in found.missing and t.fqn not in found.mismatched]
        loader = BoxLoader(directory, index, threads)
        loader.load([(t, t.box) for t in filled if t.box.numel and t.fqn in first])
        if check is not None:
            check({*found.missing, *found.mismatched})
        loader.load([(t, t.box) for t in filled if t.box.numel and t.fqn not in first])
    return LoadReport(
        index.save_id, index.save_id.step, sum(len(t.buffer) for t in filled), loader.read_size_bytes,
        time.perf_counter() - started_s, (*index.damage, *loader.healed), tuple(found.missing), tuple(found.unexpected),
        tuple(found.mismatched),
    )  # fmt: skip


@contextmanager
def opened(path: Place | str | Opened) -> Iterator[Opened]:
    """Open a checkpoint and protect it from removal during the ``with`` block. An :class:`Opened` is yielded as it is.

    Raises:
        CheckpointInvalid: a file is missing or damaged, or the checkpoint is being removed.
    """
    if isinstance(path, Opened):
        yield path
        return
    with open_attempt(path) as directory:
        if not directory.hold():
            raise CheckpointInvalid(f"{directory.path}: is being removed")
        yield Opened(directory, read_index(directory))


def load_catalogue(path: Place | str | Opened) -> Catalogue:
    """Return the catalogue of a valid checkpoint: all tensors, their layout when they were saved, and the holders.

    Raises:
        CheckpointInvalid: a file is missing or damaged.
    """
    return _index(path).catalogue


def load_values(path: Place | str | Opened) -> dict[str, object]:
    """Return the plain values that are not rank-local, as the lowest rank of the save wrote them.

    Raises:
        CheckpointInvalid: a file is missing or damaged.
    """
    index = _index(path)
    manifest = index.manifests[min(index.manifests)]
    return decode_mapping(bytes(manifest.values), f"{path}: values of rank {manifest.rank}")


def load_values_of_all(
    path: Place | str | Opened, names: Collection[str] | None = None, rank: int = -1
) -> list[dict[str, object]]:
    """Return the plain values that are not rank-local, one dict per rank that wrote them.

    The dicts of ranks of different pipeline stages differ.

    Args:
        path: the checkpoint.
        names: tensors of the rank that loads. Only the dicts that this rank needs are returned, the most important
            first. None returns the dicts of all ranks, in ascending order of ranks.
        rank: the rank that loads. Among several equally good dicts, that of this rank is preferred; -1 prefers none.

    Raises:
        CheckpointInvalid: a file is missing or damaged.
    """
    index = _index(path)
    known = index.manifests
    writers = sorted(known) if names is None else speakers(index.catalogue, names, known, rank)
    return [decode_mapping(bytes(index.manifests[r].values), f"{path}: values of rank {r}") for r in writers]


def load_locals(path: Place | str | Opened, rank: int) -> dict[str, object]:
    """Return the plain values that belonged to ``rank`` alone; empty if the checkpoint has none for this rank.

    Raises:
        CheckpointInvalid: a file is missing or damaged.
    """
    index, key = _index(path), str(rank)
    # The rank's own manifest comes first. Without one, another rank has written these values.
    order = sorted(index.manifests, key=lambda writer: (writer != rank, writer))
    for writer in order:
        found = index.manifests[writer].locals.get(key)
        if found is not None:
            return decode_mapping(bytes(found), f"{path}: locals of rank {rank}")
    return {}


def _index(path: Place | str | Opened) -> Index:
    if isinstance(path, Opened):
        return path.index
    with open_attempt(path) as directory:
        return read_index(directory)


class BoxLoader:
    """The reader that fills regions of targets (boxes with a buffer) from the stored boxes of one checkpoint."""

    def __init__(self, directory: Attempt, index: Index, threads: int) -> None:
        self.directory = directory
        self.index = index
        local = isinstance(directory, LocalAttempt)
        self.threads = threads or (threads_of_rank() if local else THREADS_MAX)
        self.batch_size_bytes = BATCH_SIZE_BYTES if local else REMOTE_BATCH_SIZE_BYTES
        self.healed: list[str] = []
        self.read_size_bytes = 0

    def bytes_of(self, fqn: str, dtype: str, shape: Shape, boxes: Sequence[Box]) -> memoryview:
        """Return the verified bytes of regions of one tensor, one after the other, each in C order.

        Raises:
            CheckpointInvalid: a region has no intact copy.
        """
        item = DTYPE_SIZE_BYTES[dtype]
        data = memoryview(bytearray(sum(box.numel for box in boxes) * item))
        wanted: list[tuple[LoadTarget, Box]] = []
        done = 0
        for box in boxes:
            part = data[done : done + box.numel * item]
            wanted.append((LoadTarget(fqn, box, dtype, part, shape), box))
            done += len(part)
        self.load(wanted)
        return data

    def load(self, wanted: list[tuple[LoadTarget, Box]]) -> None:
        """Fill regions of targets, given as pairs (target, region).

        Elements of a damaged extent are read from another copy. This is repeated if that copy is damaged.

        Raises:
            CheckpointInvalid: a region has no intact copy.
        """
        damaged: dict[tuple[str, int], set[int]] = {}  # bad extents, by the start of their box
        why: dict[str, str] = {}
        while wanted:
            bad = self._execute(self._assign(wanted, damaged, why))
            wanted = []
            for failed in bad:
                read = failed.read
                box = read.stored.name, read.stored.record.start
                damaged.setdefault(box, set()).update(range(read.first, read.last))
                why.setdefault(read.stored.record.fqn, failed.why)
                self.healed.append(failed.why)
                wanted += [
                    (target, common)
                    for target, region in read.pieces
                    for part in read.parts()
                    if (common := part.intersect(region)) is not None
                ]

    def _assign(
        self,
        wanted: Sequence[tuple[LoadTarget, Box]],
        damaged: Mapping[tuple[str, int], set[int]],
        why: Mapping[str, str],
    ) -> list[Read]:
        """Choose stored boxes that cover each wanted region exactly once, and divide the boxes into reads."""
        chosen: dict[tuple[str, int], tuple[StoredBox, list[tuple[LoadTarget, Box]]]] = {}
        known: dict[tuple[Box, tuple[Box, ...]], tuple[list[tuple[int, list[Box]]], list[Box]]] = {}
        sound: dict[str, tuple[list[StoredBox], tuple[Box, ...]]] = {}
        for target, region in wanted:
            if target.fqn not in sound:
                parts = [
                    (stored, part)
                    for stored in self.index.boxes.get(target.fqn, ())
                    for part in _sound_parts(stored, damaged.get((stored.name, stored.record.start), ()))
                ]
                sound[target.fqn] = [stored for stored, _ in parts], tuple(part for _, part in parts)
            candidates, boxes = sound[target.fqn]
            question = region, boxes
            if question not in known:  # the result is reused: a model has few shapes, and one layout
                known[question] = _cover(*question)
            given, rest = known[question]
            for n, hits in given:
                key = (candidates[n].name, candidates[n].record.start)
                chosen.setdefault(key, (candidates[n], []))[1].extend((target, hit) for hit in hits)
            if rest:
                cause = why.get(target.fqn, "no file holds it")
                raise CheckpointInvalid(
                    f"{self.directory.path}: no intact copy of {target.fqn}{rest[0]}: {cause}"
                )
        limit = self.batch_size_bytes
        return [read for stored, pieces in chosen.values() for read in reads_of(stored, pieces, limit)]

    def _execute(self, reads: list[Read]) -> list[_Bad]:
        """Perform the reads in batches, with a limited number of open files. Return the failed reads."""
        names = sorted({read.stored.name for read in reads})
        bad: list[_Bad] = []
        for first in range(0, len(names), FILES_OPEN_MAX):
            some = set(names[first : first + FILES_OPEN_MAX])
            with ExitStack() as opened:
                files = {name: opened.enter_context(self.directory.open_file(name)) for name in sorted(some)}
                ordered = in_order([read for read in reads if read.stored.name in some])
                batches = batches_of(ordered, self.batch_size_bytes)
                bad += self._perform_all([(files[batch[0].stored.name], batch) for batch in batches])
        self.read_size_bytes += sum(read.size_bytes for read in reads)
        return bad

    def _perform_all(self, work: Sequence[tuple[SourceFile, list[Read]]]) -> list[_Bad]:
        """Perform the batches in several threads, and return the failed reads.

        Each thread gets consecutive batches, so that neighbours in a file are read by one thread.
        """
        count = min(self.threads, len(work))
        if count <= 1:
            return _perform(work)
        edges = [len(work) * n // count for n in range(count + 1)]
        parts = [work[a:b] for a, b in pairwise(edges)]
        with ThreadPoolExecutor(count - 1, thread_name_prefix="holdfast-read") as pool:
            others = [pool.submit(_perform, part) for part in parts[1:]]
            return [*_perform(parts[0]), *(bad for other in others for bad in other.result())]


def _cover(region: Box, boxes: Sequence[Box]) -> tuple[list[tuple[int, list[Box]]], list[Box]]:
    """Return the parts of a region that each box covers (by the index of the box), and the parts without a box."""
    given: list[tuple[int, list[Box]]] = []
    rest = [region]
    for n, box in enumerate(boxes):
        hits = [common for part in rest if (common := part.intersect(box)) is not None]
        if hits:
            given.append((n, hits))
            rest = [] if hits == rest else [piece for part in rest for piece in subtract(part, [box])]
        if not rest:
            break
    return given, rest


def _perform(work: Iterable[tuple[SourceFile, list[Read]]]) -> list[_Bad]:
    """Read batches, verify every extent, and copy the intact ones to the targets. Return the failed reads."""
    bad: list[_Bad] = []
    scratch = memoryview(b"")
    for file, batch in work:
        size_bytes = sum(read.size_bytes for read in batch)
        if batch[0].into is None and len(scratch) < size_bytes:
            scratch = memoryview(bytearray(size_bytes))
        rest = _take_cached(file, batch, scratch, bad)
        if rest:
            _take(file, rest, scratch, bad)
    return bad


def _take_cached(file: SourceFile, batch: list[Read], scratch: memoryview, bad: list[_Bad]) -> list[Read]:
    """Perform the first reads of a batch as long as their bytes are in the page cache. Return the remaining reads."""
    end = batch[-1].start + batch[-1].size_bytes
    # The last byte is tested first: if it is not cached, the disk gets one request for the whole batch.
    if not isinstance(file, Cached) or not file.read_cached(end - 1, memoryview(bytearray(1))):
        return batch
    for n, read in enumerate(batch):
        buffer = _buffer(read, 0, scratch)
        wrong = _wrong(read, buffer, file.read_cached)
        if wrong is None:
            return batch[n:]
        bad += _settle(file, read, buffer, wrong)
    return []


def _take(file: SourceFile, batch: list[Read], scratch: memoryview, bad: list[_Bad]) -> None:
    """Perform a batch of reads with one call, and add the failed reads to ``bad``."""
    start = batch[0].start
    buffers = [_buffer(read, read.start - start, scratch) for read in batch]
    try:
        file.read_at(start, buffers)
    except CheckpointInvalid as error:
        bad += [_Bad(read, error.message) for read in batch]
        return
    for read, buffer in zip(batch, buffers, strict=True):
        bad += _settle(file, read, buffer, _wrong(read, buffer, _is_there) or ())


def _is_there(_offset: int, _piece: memoryview) -> bool:
    return True


def _buffer(read: Read, at: int, scratch: memoryview) -> memoryview:
    """Return the buffer for the bytes of a read: a part of the target's buffer, or of the scratch buffer at ``at``."""
    return scratch[at : at + read.size_bytes] if read.into is None else read.into


def _wrong(read: Read, data: memoryview, fill: Callable[[int, memoryview], bool]) -> list[int] | None:
    """Return the indices of extents that do not match their digests; None if ``fill`` returned False.

    ``fill(offset, piece)`` reads a piece of ``data`` from the file. Each piece is hashed as soon as it was filled,
    while it is in the private cache of the core.
    """
    each, wrong = read.stored.extent_size_bytes, []
    for n in range(read.first, read.last):
        first = (n - read.first) * each
        extent, digest = data[first : first + each], xxhash.xxh3_64()
        for at in range(0, len(extent), PIECE_SIZE_BYTES):
            piece = extent[at : at + PIECE_SIZE_BYTES]
            if not fill(read.start + first + at, piece):
                return None
            digest.update(piece)
        if digest.hexdigest() != read.stored.record.digests[n]:
            wrong.append(n)
    return wrong


def _settle(file: SourceFile, read: Read, data: memoryview, wrong: Sequence[int]) -> list[_Bad]:
    """Copy the intact extents of a read from the scratch buffer to the targets. Return reads of the damaged ones."""
    if read.into is None:
        _scatter_sound(read, data, wrong)
    return [_Bad(cut, _why(file, cut)) for cut in (read.cut(n, n + 1) for n in wrong)]


def _why(file: SourceFile, read: Read) -> str:
    return bad_extent(file.path, read.stored.record, read.start, read.size_bytes)


def _scatter_sound(read: Read, data: memoryview, wrong: Sequence[int]) -> None:
    """Copy the intact extents of a read to the regions of targets that need them."""
    for some in _without(read, wrong):
        at = some.start - read.start
        _scatter(some, data[at : at + some.size_bytes])


def _without(read: Read, wrong: Sequence[int]) -> Iterator[Read]:
    """Yield each sequence of intact extents of a read as one read. ``wrong`` are the damaged extents, ascending."""
    begin = read.first
    for end in (*wrong, read.last):
        if begin < end:
            yield read.cut(begin, end)
        begin = end + 1


def _sound_parts(stored: StoredBox, bad: Collection[int]) -> Iterable[Box]:
    """Return the parts of a stored box that lie outside of its damaged extents."""
    if not bad:
        return (stored.record.box,)
    whole = Read(stored, 0, len(stored.record.digests), (), None)
    return (part for run in _without(whole, sorted(bad)) for part in run.parts())


def _scatter(read: Read, data: memoryview) -> None:
    """Copy verified extents to the regions of targets that need their elements."""
    word = _WORDS[DTYPE_SIZE_BYTES[read.stored.record.dtype]]
    elements = np.frombuffer(data, dtype=word)
    done = 0
    for part in read.parts():
        source = elements[done : done + part.numel].reshape(part.sizes)
        done += part.numel
        for target, region in read.pieces:
            common = part.intersect(region)
            if common is not None:
                goal = np.frombuffer(target.buffer, dtype=word).reshape(target.box.sizes)
                goal[_slices(common, target.box)] = source[_slices(common, part)]


def _slices(inner: Box, outer: Box) -> tuple[slice, ...]:
    return tuple(
        slice(i - o, i - o + s) for i, o, s in zip(inner.offsets, outer.offsets, inner.sizes, strict=True)
    )


def _check_target(target: LoadTarget) -> None:
    size_bytes = DTYPE_SIZE_BYTES.get(target.dtype, 0) * target.box.numel
    if target.dtype not in DTYPE_SIZE_BYTES:
        raise StateError(f"target {target.fqn!r}: unknown dtype {target.dtype!r}")
    fits = target.buffer.nbytes == size_bytes and target.buffer.format == "B" and target.buffer.c_contiguous
    if target.buffer.readonly or not fits:
        raise StateError(
            f"target {target.fqn!r}: needs a writable flat buffer of {size_bytes} bytes (format B), "
            f"got {target.buffer.nbytes} bytes of format {target.buffer.format!r}"
        )
    if len(target.box.sizes) != len(target.shape) or not Box.whole(target.shape).contains(target.box):
        raise StateError(f"target {target.fqn!r}: part {target.box} is outside {list(target.shape)}")


class _Differences(msgspec.Struct):
    """The differences between the checkpoint and the targets, by name. ``mismatched`` has a line of text per name."""

    missing: list[str]
    unexpected: list[str]
    mismatched: dict[str, str]
    convertible: set[str]  # the mismatched ones that differ only in the dtype

    def refuse(self, optional: Sequence[str], strict: bool, where: Place) -> None:
        """Raise an error if the checkpoint differs in names, shapes or dtypes in a way that the caller has not allowed.

        Raises:
            CheckpointMismatch: the checkpoint differs in that way. The error lists the first differences.
        """

        def allowed(fqn: str) -> bool:
            return any(fnmatchcase(fqn, pattern) for pattern in optional)

        other = [fqn for fqn in self.mismatched if not allowed(fqn)]
        lines = [self.mismatched[fqn] for fqn in other]
        if strict:
            lines += [f"missing: {fqn}" for fqn in self.missing if not allowed(fqn)]
            lines += [f"unexpected: {fqn}" for fqn in self.unexpected if not allowed(fqn)]
        if not lines:
            return
        shown = "\n  ".join(lines[:DIFFERENCES_SHOWN])
        more = len(lines) - DIFFERENCES_SHOWN
        raise CheckpointMismatch(
            f"{where} is a checkpoint of another model ({len(lines)} differences):\n  {shown}"
            + (f"\n  ... and {more} more" if more > 0 else ""),
            hint="holdfast.load(path, model, cast=True) converts weights"
            if len(other) == len(lines) and self.convertible.issuperset(other)
            else "load it into the model that wrote it, choose another checkpoint directory, or take what fits: "
            "holdfast.load(path, model, strict=False, optional=['head.*'])",
        )


def _compare(catalogue: Catalogue, targets: Sequence[LoadTarget], known: Iterable[str]) -> _Differences:
    found = _Differences([], [], {}, set())
    for target in {(t.fqn, t.shape, t.dtype): t for t in targets}.values():
        stored = catalogue.by_fqn.get(target.fqn)
        if stored is None:
            found.missing.append(target.fqn)
        elif (stored.shape, stored.dtype) != (target.shape, target.dtype):
            if stored.shape == target.shape:
                found.convertible.add(target.fqn)
            found.mismatched[target.fqn] = (
                f"mismatch: {target.fqn} is {stored.dtype} {list(stored.shape)} in the checkpoint, "
                f"{target.dtype} {list(target.shape)} in the model"
            )
    named = {target.fqn for target in targets} | set(known)
    found.missing.sort()
    found.unexpected += [t.fqn for t in catalogue.tensors if t.fqn not in named]
    return found
