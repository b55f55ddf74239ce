"""The interface of a place that holds checkpoints: a directory, a bucket, or memory.

Theory. A :class:`Store` holds attempts (saves of one step), an :class:`Attempt` holds files with plain names. A file
becomes visible whole or not at all, and does not change after that. A file system and an object store have nothing else
in common. So there is no rename, lock or append here, only the operations of saving, judging, loading and pruning.

Invariants of every store:
1. After :meth:`Attempt.write`, :meth:`Attempt.create` (not ``later``) and :meth:`Attempt.sync` returned, their files
   survive a loss of power.
2. Missing or damaged files raise :class:`CheckpointInvalid`, failed writes :class:`StoreWriteError`, both with the
   place. A store that cannot be reached raises :class:`StoreUnreachable`, also for a single file. If this process has
   no right to read, it raises :class:`StoreDenied`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Protocol, Self, TypeAlias, runtime_checkable

from holdfast.errors import CheckpointInvalid
from holdfast.store.backends.location import Place

Put: TypeAlias = Callable[[int, memoryview], None]
"""Function that writes these bytes at this offset of a new file. It raises StoreWriteError."""


class Closes(Protocol):
    """A context manager that is closed at the end of its block."""

    def close(self) -> None:
        """Release the resources. A second call is harmless."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class SourceFile(Closes, Protocol):
    """A file opened for reading."""

    @property
    def path(self) -> Place:
        """The place of the file."""

    @property
    def size_bytes(self) -> int:
        """Its size when it was opened."""

    def read_at(self, offset: int, buffers: list[memoryview]) -> None:
        """Fill the buffers one after the other from ``offset`` on. Several threads may call this at once.

        Raises:
            CheckpointInvalid: the file ends too early, or cannot be read.
        """


def read_whole(file: SourceFile, size_bytes_max: int) -> bytes:
    """Return the content of a file.

    Raises:
        CheckpointInvalid: as :meth:`SourceFile.read_at`, or larger than the limit.
    """
    if file.size_bytes > size_bytes_max:
        raise CheckpointInvalid(f"{file.path}: {file.size_bytes} bytes; the limit is {size_bytes_max}")
    buffer = bytearray(file.size_bytes)
    file.read_at(0, [memoryview(buffer)])
    return bytes(buffer)


@runtime_checkable
class Cached(Protocol):
    """An additional interface of a :class:`SourceFile` whose bytes may be in memory already."""

    def read_cached(self, offset: int, buffer: memoryview) -> bool:
        """Fill the buffer without waiting for a disk. Return False if it holds garbage and its bytes must be read."""


class Attempt(Closes, Protocol):
    """The files of one attempt to save.

    ``owner`` distinguishes the writers of one name. ``close`` ends the mark of ``hold``.
    """

    @property
    def path(self) -> Place:
        """The place of the attempt."""

    @property
    def in_order(self) -> bool:
        """True when the bytes of a new file must be put one after the other."""

    @property
    def parallel(self) -> int:
        """Number of small requests that are worth sending at a time."""

    def hold(self) -> bool:
        """Mark the attempt as being read or written, until it is closed. Return False when it is being removed."""

    def names(self) -> list[str]:
        """Return the names of all finished files, sorted.

        Raises:
            CheckpointInvalid: the names cannot be read.
        """

    def exists(self, name: str) -> bool:
        """Return True when there is an entry of this name.

        Raises:
            CheckpointInvalid: the names cannot be read.
        """

    def open_file(self, name: str) -> SourceFile:
        """Open a file for reading.

        Raises:
            CheckpointInvalid: the file is missing, or is no regular file.
        """

    def read(self, name: str, size_bytes_max: int) -> bytes:
        """Return the content of a file.

        Raises:
            CheckpointInvalid: as :meth:`open_file`, or larger than the limit.
        """

    def write(self, name: str, data: bytes, owner: str) -> None:
        """Write a file that appears whole and durable. Replace an existing one.

        Raises:
            StoreWriteError: the file cannot be written.
        """

    def create(self, name: str, data: bytes, owner: str, *, later: bool = False) -> bool:
        """Write a file like :meth:`write`, but never replace one. Return False when one exists.

        Args:
            name, data, owner: as for :meth:`write`.
            later: it need not appear before :meth:`publish` returned.
        """

    def new_file(
        self, name: str, owner: str, *, size_bytes: int, direct: bool = False
    ) -> AbstractContextManager[Put]:
        """Yield a function that writes a new file piece by piece.

        The file appears after the block, or in :meth:`publish`.

        Args:
            name, owner: as for :meth:`write`.
            size_bytes: total size of the file.
            direct: write past the page cache, and in order (a local directory).

        Raises:
            StoreWriteError: the file cannot be written; nothing visible has changed.
        """

    def publish(self) -> None:
        """Make new files appear, in the order in which they were made.

        After a loss of power, an existing file does not prove that the others exist, but its content is complete.

        Raises:
            StoreWriteError: a file cannot be written.
        """

    def sync(self) -> None:
        """Publish the new files, and make all files durable.

        Raises:
            StoreWriteError: a file cannot be written.
        """


class Store(Protocol):
    """A place that holds attempts by name."""

    @property
    def path(self) -> Place:
        """The place of the store."""

    def names(self) -> list[str]:
        """Return the names of all entries; empty when the place does not exist.

        Raises:
            CheckpointInvalid: the names cannot be read.
        """

    def open(self, name: str) -> Attempt:
        """Open an attempt.

        Raises:
            CheckpointInvalid: the attempt does not exist.
        """

    def create(self, name: str) -> Attempt:
        """Open an attempt. Make it if it is missing; its first sync makes that durable.

        Raises:
            StoreWriteError: the attempt cannot be made.
        """

    def age_s(self, name: str) -> float:
        """Return the seconds since a file was last added to an attempt; infinite when it is gone.

        Raises:
            CheckpointInvalid: the age cannot be read.
        """

    def remove(self, name: str) -> bool:
        """Remove an attempt, which vanishes at once. Return False when a process reads or writes it.

        Raises:
            StoreWriteError: the attempt cannot be removed.
        """

    def sweep(self) -> None:
        """Finish removals that a crash interrupted.

        Raises:
            StoreWriteError: an entry cannot be removed.
        """

    def probe(self) -> None:
        """Test whether attempts can be written here.

        Raises:
            StoreWriteError: attempts cannot be written here.
        """
