"""The state files of the memory tier: the newest states of each rank, in shared memory that survives the rank.

Theory. Each rank has two slots, which are files in the private directory of the run's status pages. A state is copied
into the slot that does not hold the newest state. So a kill during a copy costs the older state, never both states. A
slot begins with one *marker*: the step, the offset and digest of a description, and a digest of the marker itself. The
marker is zeroed before the first byte of the slot changes and stored after the last byte, so a slot with an incomplete
copy has no marker. The description has a digest of every box. After the block of a step the script may still change its
state. After these changes the word after the marker is set: the state is then *whole*.

Invariants:
1. A slot without a valid marker holds nothing. A new copy into a slot destroys its earlier content at once.
2. Nothing is read from a slot before all its digests are verified. A slot with a wrong digest is dropped: its
   marker is zeroed.
3. The memory is allocated before it is written. So a lack of memory is an error here, not a SIGBUS in a copy.
4. A whole state no longer changes.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import struct
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple, Protocol, Self, runtime_checkable

import msgspec
import xxhash

from holdfast.errors import CheckpointInvalid, StateError
from holdfast.store.layouts.layout import DTYPE_SIZE_BYTES, Box, Catalogue, RankLayout, TensorMeta
from holdfast.store.write.writer import TensorSource

SLOTS = 2
MAGIC = 0x314D454D444C4F48  # "HOLDMEM1"
CHUNK_SIZE_BYTES = 1 << 20  # is copied, and hashed while it is in the cache
_WORDS = 6  # magic, step + 1, start, size and digest of the description, digest of the words before
MARKER_SIZE_BYTES = 8 * _WORDS
_FORM = struct.Struct(f"={_WORDS}Q")
_OWN = slice(MARKER_SIZE_BYTES - 8, MARKER_SIZE_BYTES)  # the digest of the other words
_WHOLE = slice(_OWN.stop, _OWN.stop + 8)  # the same digest again when the state is whole
_WORD_MAX = 2**63 - 1  # largest word of a status page
_DATA_AT = 4096
DIGEST_MAX = 2**64 - 1  # the digest whose encoding takes the most room
ALIGNMENT = 64


class Marked(NamedTuple):
    """The content of a slot's marker. ``digest`` (63 bits) covers all that the slot holds.

    ``whole`` means that the script no longer changes the state.
    """

    step: int
    digest: int
    whole: bool


class KeptBox(msgspec.Struct, frozen=True, array_like=True):
    """One box of a state: ``start`` is the offset of its bytes in the slot, ``digest`` their xxh3-64."""

    meta: TensorMeta
    start: int
    size_bytes: int
    digest: int


class Description(msgspec.Struct, frozen=True):
    """The description of a slot: the state of ``rank`` after ``step`` updates.

    ``values`` (common to all ranks) and ``local`` (of this rank) are plain values as JSON. ``amended``: the state
    includes the changes that the script made after the block of the previous step.
    """

    step: int
    rank: int
    world: int
    boxes: tuple[KeptBox, ...]
    values: bytes
    local: bytes
    amended: bool = False


class StoredState:
    """One committed state in a slot, mapped read-only."""

    def __init__(self, path: Path, data: memoryview, description: Description) -> None:
        self.path = path
        self.step = description.step
        self.values = description.values
        self.local = description.local
        self.world = description.world
        self.amended = description.amended
        self.whole = bytes(data[_WHOLE]) == bytes(data[_OWN])
        self._rank = description.rank
        self._data = data
        self._boxes = {(box.meta.fqn, box.meta.box): box for box in description.boxes}

    @property
    def size_bytes(self) -> int:
        """Total size of all boxes in bytes."""
        return sum(box.size_bytes for box in self._boxes.values())

    def catalogue(self) -> Catalogue:
        """Return a catalogue of the state's tensors, with the boxes of this rank.

        A tensor of which the rank holds no element is listed as if the rank had all of it.
        """
        metas = [box.meta for box in self._boxes.values()]
        held = [meta for meta in metas if meta.box.numel]
        named = {meta.fqn for meta in held}
        empty = {
            m.fqn: TensorMeta(m.fqn, m.dtype, m.shape, Box.whole(m.shape))
            for m in metas
            if m.fqn not in named
        }
        return Catalogue.from_layouts(
            {self._rank: RankLayout(self._rank, (*held, *empty.values()), self.world)}
        )

    def view(self, fqn: str, box: Box) -> memoryview:
        """Return the bytes of one box.

        Raises:
            CheckpointInvalid: the slot does not hold this box.
        """
        found = self._boxes.get((fqn, box))
        if found is None:
            raise CheckpointInvalid(f"{self.path.name} does not hold {fqn}{box}")
        return self._data[found.start : found.start + found.size_bytes]

    def verify(self) -> None:
        """Compare the bytes of every box with its digest.

        Raises:
            CheckpointInvalid: a digest does not match. The slot is then dropped.
        """
        for found in self._boxes.values():
            data = self._data[found.start : found.start + found.size_bytes]
            if xxhash.xxh3_64_intdigest(data) != found.digest:
                drop(self.path)
                raise CheckpointInvalid(
                    f"{self.path.name}, step {self.step}: {found.meta.fqn}{found.meta.box} does not fit its digest"
                )


class Slots:
    """The two slots of one rank in the memory tier, for writing.

    Args:
        directory: a directory in shared memory.
        rank: the rank whose states the slots hold.
    """

    def __init__(self, directory: Path, rank: int) -> None:
        self._paths = tuple(slot_path(directory, rank, number) for number in range(SLOTS))
        self._rank = rank
        self._maps: list[mmap.mmap | None] = [None] * SLOTS
        self._last: memoryview | None = None  # the slot of the newest copy

    def steps(self, *, whole: bool = False) -> tuple[int, ...]:
        """Return the steps of the kept states, ascending. ``whole``: skip states that the script may still change."""
        return tuple(sorted(found.step for found in self._marked() if found.whole or not whole))

    def newest(self, *, whole: bool = False) -> Marked | None:
        """Return the marker of the newest state, or None. ``whole``: skip states that the script may still change."""
        return max((found for found in self._marked() if found.whole or not whole), default=None)

    def _marked(self) -> list[Marked]:
        return [found for path in self._paths if (found := read_marked(path)) is not None]

    def keep(
        self,
        step: int,
        source: TensorSource,
        layout: RankLayout,
        values: bytes,
        local: bytes,
        *,
        amended: bool = False,
    ) -> int:
        """Copy the state after ``step`` updates into the slot with the older state. Return the state's size in bytes.

        ``values`` (common to all ranks) and ``local`` (of this rank) are plain values as JSON. ``amended``: the state
        includes the changes that the script made after the block of the previous step.

        Raises:
            StateError: shared memory is full.
        """
        boxes, end = _places(layout)
        draft = Description(step, self._rank, layout.world, boxes, values, local, amended)
        memory = self._emptied(end + len(msgspec.msgpack.encode(draft)), step)
        kept = _copy_all(source, boxes, memory)
        description = msgspec.msgpack.encode(msgspec.structs.replace(draft, boxes=kept))
        memory[end : end + len(description)] = description
        memory[:MARKER_SIZE_BYTES] = marker_of(step, end, description)
        self._last = memory
        return sum(box.size_bytes for box in kept)

    def finish(self) -> None:
        """Mark the newest copied state as whole: the script no longer changes it, so other processes may receive it."""
        if self._last is not None:
            self._last[_WHOLE] = self._last[_OWN]

    def room(self, step: int, size_bytes: int) -> memoryview:
        """Return the memory of an emptied slot of at least ``size_bytes``, for the state of ``step``.

        States of later steps are dropped, because the job has returned to an earlier step. If both slots still hold
        states, the older state is dropped.

        Raises:
            StateError: shared memory is full.
        """
        for path in self._paths:
            if (marked_step(path) or 0) > step:
                drop(path)
        return self._emptied(size_bytes)

    def keep_only(self, step: int) -> None:
        """Drop the states of all steps except ``step``, at which the job is now."""
        for path in self._paths:
            if marked_step(path) not in (None, step):
                drop(path)

    def forget(self, step: int) -> None:
        """Drop the state of ``step``, if a slot holds it."""
        for path in self._paths:
            if marked_step(path) == step:
                drop(path)

    def remove(self) -> None:
        """Remove the files of both slots."""
        self._maps = [None] * SLOTS
        self._last = None
        for path in self._paths:
            path.unlink(missing_ok=True)

    def _emptied(self, size_bytes: int, step: int | None = None) -> memoryview:
        """Choose a slot for a new state, zero its marker, and return its memory.

        The slot is the one that holds the state of ``step``, if any. Otherwise it is an empty slot, or the slot with
        the older state.
        """
        held = [marked_step(path) for path in self._paths]
        number = min(range(SLOTS), key=lambda n: (held[n] != step, -1 if held[n] is None else held[n]))
        memory = self._memory(number, size_bytes)
        memory[:MARKER_SIZE_BYTES] = bytes(MARKER_SIZE_BYTES)
        return memory

    def _memory(self, number: int, size_bytes: int) -> memoryview:
        known = self._maps[number]
        if known is not None and len(known) >= size_bytes:
            return memoryview(known)
        self._maps[number] = None
        path = self._paths[number]
        made = self._maps[number] = map_file(path, size_bytes)
        return memoryview(made)


def map_file(path: Path, size_bytes: int) -> mmap.mmap:
    """Return a writable mapping of a file. The file is made, or grown to ``size_bytes``, and its memory allocated.

    Raises:
        StateError: shared memory is full.
    """
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            size_bytes = max(size_bytes, os.fstat(fd).st_size)
            os.posix_fallocate(fd, 0, size_bytes)
            return mmap.mmap(fd, size_bytes)
        finally:
            os.close(fd)
    except OSError as error:
        raise StateError(
            f"{path}: {size_bytes} bytes of shared memory cannot be had: {error.strerror}",
            hint="give it more room (df -h /dev/shm; in a container: --shm-size), or session(memory=0)",
        ) from error


class Incoming:
    """A slot that is being filled with a state from another node, made by :meth:`begin`."""

    def __init__(self, memory: memoryview) -> None:
        self._memory = memory

    @classmethod
    def begin(cls, directory: Path, rank: int, step: int, size_bytes: int) -> Self:
        """Empty a slot of ``rank``, and return an object that writes the received state into it.

        Raises:
            StateError: shared memory is full.
        """
        return cls(Slots(directory, rank).room(step, size_bytes))

    def write(self, start: int, data: bytes) -> None:
        """Write received bytes at offset ``start`` of the slot. Bytes of the marker are skipped.

        Raises:
            CheckpointInvalid: the bytes are outside of the slot.
        """
        if not 0 <= start <= start + len(data) <= len(self._memory):
            raise CheckpointInvalid(f"{len(data)} bytes at {start} are outside of a slot")
        first = max(0, MARKER_SIZE_BYTES - start)  # the marker comes last
        self._memory[start + first : start + len(data)] = data[first:]

    def commit(self, marker: bytes) -> None:
        """Store the marker, after all bytes have arrived. The slot then holds the state.

        Raises:
            CheckpointInvalid: ``marker`` is not a valid marker.
        """
        if not is_sound(words_of(marker)):
            raise CheckpointInvalid("not the marker of a slot")
        self._memory[:MARKER_SIZE_BYTES] = marker


def read_raw(directory: Path, rank: int, step: int, start: int, size_bytes: int) -> tuple[int, bytes, bytes]:
    """Return the size, the marker and a piece of the slot that holds the state of ``step``.

    The piece is the ``size_bytes`` bytes from offset ``start`` on, or fewer at the end of the slot.

    Raises:
        CheckpointInvalid: no slot of ``rank`` has a state of this step.
    """
    path = _slot_with(directory, rank, step)
    with path.open("rb") as file:
        marker = file.read(MARKER_SIZE_BYTES)
        file.seek(start)
        return path.stat().st_size, marker, file.read(size_bytes)


def _slot_with(directory: Path, rank: int, step: int) -> Path:
    """Return the path of the slot with the state of ``step``.

    Raises:
        CheckpointInvalid: no slot of ``rank`` has a state of this step.
    """
    for number in range(SLOTS):
        path = slot_path(directory, rank, number)
        if marked_step(path) == step:
            return path
    raise CheckpointInvalid(f"no state of rank {rank} at step {step} is in memory")


def slot_path(directory: Path, rank: int, number: int) -> Path:
    """Return the path of slot ``number`` (0 or 1) of a rank."""
    return directory / f"memory-{rank:05d}-{number}"


def kept_steps(directory: Path, rank: int, *, whole: bool = False) -> tuple[int, ...]:
    """Return the steps of the states of ``rank`` in ``directory``, ascending.

    Only the markers are read, and no data is verified. ``whole``: skip states that the script may still change.
    """
    return Slots(directory, rank).steps(whole=whole)


@contextlib.contextmanager
def open_kept(directory: Path, rank: int, step: int) -> Iterator[StoredState]:
    """Yield the verified state of ``rank`` after ``step`` updates.

    Raises:
        CheckpointInvalid: the state is missing or damaged. A damaged state is dropped.
    """
    path = _slot_with(directory, rank, step)
    with Mapped(path) as data:
        kept = _read(path, data)
        kept.verify()
        yield kept


def was_amended(directory: Path, rank: int, step: int) -> bool:
    """Return True if a slot has the state of ``rank`` after ``step`` updates, and this state is amended.

    An amended state includes the changes that the script made after the block of the previous step. The boxes are not
    verified.
    """
    with contextlib.suppress(CheckpointInvalid):
        path = _slot_with(directory, rank, step)
        with Mapped(path) as data:
            return _read(path, data).amended
    return False


def marked_step(path: Path) -> int | None:
    """Return the step of the state in a slot; None if the slot has no valid marker."""
    found = read_marked(path)
    return None if found is None else found.step


def read_marked(path: Path) -> Marked | None:
    """Return the content of a slot's marker; None if the slot has no valid marker."""
    try:
        with path.open("rb") as file:
            head = file.read(_WHOLE.stop)
    except OSError:
        return None
    words = words_of(head[:MARKER_SIZE_BYTES])
    if not is_sound(words):
        return None
    return Marked(words[1] - 1, digest_of(head), head[_WHOLE] == head[_OWN])


def digest_of(marker: bytes) -> int:
    """Return the digest of a slot's content from the slot's marker. Its 63 bits fit into a word of a status page."""
    return int.from_bytes(marker[_OWN], sys.byteorder) & _WORD_MAX


def drop(path: Path) -> None:
    """Zero the marker of a slot, so that it holds nothing."""
    with contextlib.suppress(FileNotFoundError), path.open("r+b") as file:
        file.write(bytes(MARKER_SIZE_BYTES))


class Mapped:
    """A context manager that maps a file read-only. No view of the file may be used after the ``with`` block."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> memoryview:
        with self._path.open("rb") as file:
            self._map = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
        return memoryview(self._map)

    def __exit__(self, *_: object) -> None:
        del self._map  # unmapped with the last view


def _read(path: Path, data: memoryview) -> StoredState:
    """Return the state in a slot. Its boxes must lie inside the slot; their content is not verified.

    Raises:
        CheckpointInvalid: the slot holds no valid state.
    """
    words = words_of(data[:MARKER_SIZE_BYTES])
    if not is_sound(words):
        raise CheckpointInvalid(f"{path.name} holds no committed state")
    start, size = words[2], words[3]
    text = data[start : start + size]
    if len(text) != size or xxhash.xxh3_64_intdigest(text) != words[4]:
        drop(path)
        raise CheckpointInvalid(f"{path.name}: its description does not fit its digest")
    try:
        description = msgspec.msgpack.decode(text, type=Description)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise CheckpointInvalid(f"{path.name}: not a description of a state: {error}") from error
    for box in description.boxes:
        if not 0 <= box.start <= box.start + box.size_bytes <= start or box.size_bytes != box.meta.size_bytes:
            raise CheckpointInvalid(f"{path.name}: {box.meta.fqn}{box.meta.box} lies outside of it")
    return StoredState(path, data, description)


def marker_of(step: int, start: int, description: bytes) -> bytes:
    """Return the marker of a slot or log entry of ``step``. The description of the entry begins at offset ``start``."""
    words = MAGIC, step + 1, start, len(description), xxhash.xxh3_64_intdigest(description)
    return _FORM.pack(*words, _own_digest(words))


def words_of(marker: bytes | memoryview) -> tuple[int, ...]:
    """Return the words of ``marker``; an empty tuple if ``marker`` is too short, because the file ends too early."""
    return _FORM.unpack(marker) if len(marker) == MARKER_SIZE_BYTES else ()


def is_sound(words: tuple[int, ...]) -> bool:
    """Return True if ``words`` are a valid marker of a slot or log entry."""
    return len(words) == _WORDS and words[0] == MAGIC and words[5] == _own_digest(words)


def _own_digest(words: tuple[int, ...]) -> int:
    return xxhash.xxh3_64_intdigest(_FORM.pack(*words[:5], 0)[:-8])


def _places(layout: RankLayout) -> tuple[tuple[KeptBox, ...], int]:
    """Return each box with its offset in a slot and a placeholder for its digest, and the end of the last box."""
    places: list[KeptBox] = []
    end = _DATA_AT
    for meta in layout.tensors:
        if meta.dtype not in DTYPE_SIZE_BYTES:
            raise StateError(f"tensor {meta.fqn!r}: unknown dtype {meta.dtype!r}")
        places.append(KeptBox(meta, end, meta.size_bytes, DIGEST_MAX))
        end += -(-meta.size_bytes // ALIGNMENT) * ALIGNMENT
    return tuple(places), end


@runtime_checkable
class PiecewiseSource(TensorSource, Protocol):
    """A provider of the bytes of boxes in small pieces, so that no copy of a whole box is needed on a device."""

    def pieces(self, fqn: str, box: Box) -> Iterator[memoryview]:
        """Yield the bytes of one box in C order, in pieces. Each piece is valid until the next piece is requested."""


def _copy_all(source: TensorSource, boxes: tuple[KeptBox, ...], memory: memoryview) -> tuple[KeptBox, ...]:
    """Copy every box to its offset in the slot. Return the boxes with their digests."""
    digests: list[int] = []
    for box in boxes:
        name = box.meta.fqn, box.meta.box
        pieces = source.pieces(*name) if isinstance(source, PiecewiseSource) else (source.view(*name),)
        digests.append(copy_hashed(pieces, memory[box.start : box.start + box.size_bytes]))
    return tuple(
        msgspec.structs.replace(box, digest=digest) for box, digest in zip(boxes, digests, strict=True)
    )


def copy_hashed(pieces: Iterable[memoryview], goal: memoryview) -> int:
    """Copy ``pieces`` to ``goal``, one after the other, and return the xxh3-64 digest of all their bytes.

    Each chunk is hashed while it is in the processor's cache.

    Raises:
        StateError: the pieces have another total size than ``goal``.
    """
    import numpy as np  # here, since an agent copies no state

    digest = xxhash.xxh3_64()
    if not len(goal):
        return digest.intdigest()
    target, at = np.frombuffer(goal, np.uint8), 0
    for piece in pieces:
        source = np.frombuffer(piece, np.uint8)
        if at + len(source) > len(target):
            raise StateError(f"more bytes were offered for a part of {len(target)} bytes")
        for start in range(0, len(source), CHUNK_SIZE_BYTES):
            part = source[start : start + CHUNK_SIZE_BYTES]
            chunk = target[at : at + len(part)]
            np.copyto(chunk, part)
            digest.update(chunk.data)
            at += len(part)
    if at != len(target):
        raise StateError(f"{at} bytes were offered for a part of {len(target)} bytes")
    return digest.intdigest()
