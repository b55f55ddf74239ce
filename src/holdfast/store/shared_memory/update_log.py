"""The update log of the memory tier: the inputs of the updates since a kept state, in memory that survives the rank.

Theory. One file per rank is a ring of entries of equal size. The entry of step s is at s modulo the number of entries.
An entry holds the local gradients that the update of its step used, and the settings of the parameter groups as JSON.
Every tensor of an entry has a digest. As in a slot of the memory tier, the marker of an entry is zeroed before the
first byte changes and stored after the last byte. From a state of step T and the entries of T, T + 1, ... up to s - 1
without a hole, the state of s can be computed. The log is used only after one such computation gave the bits of the
real state. A word of the file records this proof.

Invariants:
1. An entry without a valid marker holds nothing. A new copy into an entry destroys its earlier content at once.
2. Nothing is read from an entry before all its digests are verified.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, NamedTuple

import msgspec
import xxhash

from holdfast.errors import CheckpointInvalid, StateError
from holdfast.store.shared_memory.memory_slots import (
    ALIGNMENT,
    DIGEST_MAX,
    MARKER_SIZE_BYTES,
    Mapped,
    copy_hashed,
    is_sound,
    map_file,
    marker_of,
    words_of,
)

_HEAD = 4096  # size of the part before the first entry
_MAGIC = 0x31474F4C444C4F48  # "HOLDLOG1"
_HEAD_FORM = struct.Struct("=3Q")  # magic, number of entries, size of one
_FORM = slice(0, _HEAD_FORM.size)
_PROVEN = slice(24, 32)
_YES = b"\x01" * 8
_PAGE = 4096


class Gradient(NamedTuple):
    """One local gradient of a rank; ``data`` are its bytes in C order."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: memoryview


class Update(NamedTuple):
    """The inputs of the update of one step: the gradients, and the ``settings`` of the parameter groups as JSON."""

    step: int
    settings: bytes
    gradients: tuple[Gradient, ...]


class _RecordPlace(msgspec.Struct, frozen=True, array_like=True):
    """One gradient of a log entry: ``start`` is the offset of its bytes in the entry, ``digest`` their xxh3-64."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    size_bytes: int
    digest: int


class _LogEntry(msgspec.Struct, frozen=True):
    """The description of one log entry: the step, the settings as JSON, and the gradients."""

    step: int
    settings: bytes
    places: tuple[_RecordPlace, ...]


class UpdateLog:
    """The update log of one rank, for writing.

    Args:
        directory: a directory in shared memory.
        rank: the rank whose updates the log holds.
        entries: number of entries of the ring, each with one update.
    """

    def __init__(self, directory: Path, rank: int, entries: int) -> None:
        self._path = log_path(directory, rank)
        self._entries = entries
        self._map: mmap.mmap | None = None
        self._size_bytes = 0  # of an entry

    def append(self, update: Update) -> int:
        """Copy an update into the ring, in place of the oldest update. Return the size of the copy in bytes.

        Raises:
            StateError: shared memory has too little room.
        """
        draft, end = _places(update)
        needed = end + len(msgspec.msgpack.encode(draft))
        memory = self._memory(needed)
        at = _HEAD + update.step % self._entries * self._size_bytes
        entry = memory[at : at + self._size_bytes]
        entry[:MARKER_SIZE_BYTES] = bytes(MARKER_SIZE_BYTES)
        digests = [
            copy_hashed((gradient.data,), entry[place.start : place.start + place.size_bytes])
            for gradient, place in zip(update.gradients, draft.places, strict=True)
        ]
        places = tuple(
            msgspec.structs.replace(place, digest=digest)
            for place, digest in zip(draft.places, digests, strict=True)
        )
        description = msgspec.msgpack.encode(msgspec.structs.replace(draft, places=places))
        entry[end : end + len(description)] = description
        entry[:MARKER_SIZE_BYTES] = marker_of(update.step, end, description)
        return end

    def prove(self) -> None:
        """Record in the file that an update was computed again from this log and gave the same bits."""
        if self._map is not None:
            self._map[_PROVEN] = _YES

    def truncate(self, step: int) -> None:
        """Drop the entries of ``step`` and of later steps, because the job has returned to the state of ``step``."""
        form = _form_of(self._path)
        if form is None:
            return
        with self._path.open("r+b") as file:
            for number in range(form.entries):
                marked = _marked_step(_marker_at(file, form, number))
                if marked is not None and marked >= step:
                    file.seek(-MARKER_SIZE_BYTES, os.SEEK_CUR)
                    file.write(bytes(MARKER_SIZE_BYTES))

    def remove(self) -> None:
        """Remove the file of the log."""
        self._map = None
        self._path.unlink(missing_ok=True)

    def _memory(self, needed: int) -> memoryview:
        if self._map is None and (form := _form_of(self._path)) is not None and form.entries == self._entries:
            self._size_bytes = form.size_bytes
            self._map = map_file(self._path, _HEAD + form.entries * form.size_bytes)
        if self._map is None or self._size_bytes < needed:
            self.remove()
            room = os.statvfs(self._path.parent)
            if self._entries * needed * 2 > room.f_bavail * room.f_frsize:
                raise StateError(f"a log of {self._entries * needed} bytes would take half of shared memory")
            self._size_bytes = -(-(needed + _PAGE) // _PAGE) * _PAGE  # settings may grow
            made = self._map = map_file(self._path, _HEAD + self._entries * self._size_bytes)
            made[_FORM] = _HEAD_FORM.pack(_MAGIC, self._entries, self._size_bytes)
        return memoryview(self._map)


class _RecordForm(NamedTuple):
    """The form of a log file: number of entries, size of one entry in bytes, and whether the log is proven."""

    entries: int
    size_bytes: int
    proven: bool


def log_path(directory: Path, rank: int) -> Path:
    """Return the path of the log of one rank."""
    return directory / f"updates-{rank:05d}"


def reachable(directory: Path, rank: int, states: Sequence[int]) -> tuple[int, ...]:
    """Return the steps (ascending) whose states the log of ``rank`` can compute from the states of other steps.

    ``states`` are the steps of the kept states. Only the markers of the log are read, and no data is verified.
    """
    path = log_path(directory, rank)
    form = _form_of(path)
    if form is None or not form.proven:
        return ()
    try:
        with path.open("rb") as file:
            marked = {_marked_step(_marker_at(file, form, number)) for number in range(form.entries)}
    except OSError:
        return ()
    found: set[int] = set()
    for state in states:
        step = state
        while step in marked:
            step += 1
            found.add(step)
    return tuple(sorted(found))


@contextlib.contextmanager
def open_updates(directory: Path, rank: int, first: int, stop: int) -> Iterator[tuple[Update, ...]]:
    """Yield the verified updates of ``rank`` for the steps from ``first`` to ``stop`` - 1.

    Raises:
        CheckpointInvalid: an update is missing or damaged.
    """
    path = log_path(directory, rank)
    form = _form_of(path)
    if form is None and first < stop:
        raise CheckpointInvalid(f"no log of updates of rank {rank} is in memory")
    if form is None or first >= stop:
        yield ()
        return
    with Mapped(path) as data:
        yield tuple(_read(path, data, form, step) for step in range(first, stop))


def _read(path: Path, data: memoryview, form: _RecordForm, step: int) -> Update:
    at = _HEAD + step % form.entries * form.size_bytes
    entry = data[at : at + form.size_bytes]
    words = words_of(entry[:MARKER_SIZE_BYTES])
    where = f"{path.name}, update of step {step}"
    if not is_sound(words) or words[1] - 1 != step:
        raise CheckpointInvalid(f"{where}: it is not there")
    start, size = words[2], words[3]
    text = entry[start : start + size]
    if len(text) != size or xxhash.xxh3_64_intdigest(text) != words[4]:
        raise CheckpointInvalid(f"{where}: its description does not fit its digest")
    try:
        description = msgspec.msgpack.decode(text, type=_LogEntry)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise CheckpointInvalid(f"{where}: not a description of an update: {error}") from error
    gradients = []
    for place in description.places:
        part = entry[place.start : place.start + place.size_bytes]
        if len(part) != place.size_bytes or xxhash.xxh3_64_intdigest(part) != place.digest:
            raise CheckpointInvalid(f"{where}: the gradient of {place.name} does not fit its digest")
        gradients.append(Gradient(place.name, place.dtype, place.shape, part))
    return Update(step, description.settings, tuple(gradients))


def _form_of(path: Path) -> _RecordForm | None:
    """Return the form of a log file; None if there is no valid log."""
    try:
        with path.open("rb") as file:
            head, size_bytes = file.read(_PROVEN.stop), path.stat().st_size
    except OSError:
        return None
    if len(head) < _PROVEN.stop:
        return None
    magic, entries, of_entry = _HEAD_FORM.unpack(head[_FORM])
    if magic != _MAGIC or entries < 1 or size_bytes < _HEAD + entries * of_entry:
        return None
    return _RecordForm(entries, of_entry, head[_PROVEN] == _YES)


def _marker_at(file: BinaryIO, form: _RecordForm, number: int) -> bytes:
    file.seek(_HEAD + number * form.size_bytes)
    return file.read(MARKER_SIZE_BYTES)


def _marked_step(marker: bytes) -> int | None:
    words = words_of(marker)
    return words[1] - 1 if is_sound(words) else None


def _places(update: Update) -> tuple[_LogEntry, int]:
    """Return an entry's description (with placeholders for digests), and the end offset of its last gradient."""
    places: list[_RecordPlace] = []
    end = ALIGNMENT
    for name, dtype, shape, data in update.gradients:
        places.append(_RecordPlace(name, dtype, shape, end, len(data), DIGEST_MAX))
        end += -(-len(data) // ALIGNMENT) * ALIGNMENT
    return _LogEntry(update.step, update.settings, tuple(places)), end
