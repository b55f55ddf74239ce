"""The interface of every store of checkpoints: a directory, a bucket, or memory.

Theory. A :class:`Store` holds attempts (saves of one step), an :class:`Attempt` holds files with plain names. A file
becomes visible whole or not at all, and is not changed in place after that. A file system and an object store have
only this in common. So the interface has no rename, lock or append, only the operations of saving, validating, loading
and pruning.

Invariants of every store:
1. When :meth:`Attempt.write`, :meth:`Attempt.create` (without ``later``) or :meth:`Attempt.sync` has returned, the
   files survive a loss of power.
2. Missing or damaged files raise :class:`CheckpointInvalid`, failed writes :class:`StoreWriteError`. A store that
   cannot be reached raises :class:`StoreUnreachable`, also for a single file. A store that this process has no right to
   read raises :class:`StoreDenied`. The errors name the path or URL.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Protocol, Self, TypeAlias, runtime_checkable

from holdfast.errors import CheckpointInvalid
from holdfast.store.backends.location import Place

Put: TypeAlias = Callable[[int, memoryview], None]
"""Function ``put(offset, data)`` that writes ``data`` at ``offset`` of a new file. It may raise StoreWriteError."""


class Closes(Protocol):
    """The base of context managers that call :meth:`close` at the end of their ``with`` block."""

    def close(self) -> None:
        """Release the resources of this object. A second call is harmless."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class SourceFile(Closes, Protocol):
    """A file of an attempt, opened for reading."""

    @property
    def path(self) -> Place:
        """The path or URL of the file."""

    @property
    def size_bytes(self) -> int:
        """The size of the file in bytes when it was opened."""

    def read_at(self, offset: int, buffers: list[memoryview]) -> None:
        """Fill the buffers, one after the other, with the bytes of the file from ``offset`` on.

        Several threads may call this method at the same time.

        Raises:
            CheckpointInvalid: the file ends too early, or cannot be read.
        """


def read_whole(file: SourceFile, size_bytes_max: int) -> bytes:
    """Return the content of an opened file.

    Raises:
        CheckpointInvalid: the file cannot be read, or is larger than ``size_bytes_max``.
    """
    if file.size_bytes > size_bytes_max:
        raise CheckpointInvalid(f"{file.path}: {file.size_bytes} bytes; the limit is {size_bytes_max}")
    buffer = bytearray(file.size_bytes)
    file.read_at(0, [memoryview(buffer)])
    return bytes(buffer)


@runtime_checkable
class Cached(Protocol):
    """The additional interface of a :class:`SourceFile` whose bytes may already be in the page cache of the host."""

    def read_cached(self, offset: int, buffer: memoryview) -> bool:
        """Fill the buffer from the page cache, without waiting for a disk. Return False if the cache lacks some bytes.

        After False the buffer holds garbage, and the caller must read the bytes with :meth:`SourceFile.read_at`.
        """


class Attempt(Closes, Protocol):
    """The files of one attempt (a save of one step).

    The argument ``owner`` of the methods is a text that differs between processes that may write a file of the same
    name. ``close`` ends the protection that ``hold`` began.
    """

    @property
    def path(self) -> Place:
        """The path or URL of the attempt."""

    @property
    def in_order(self) -> bool:
        """True if the bytes of a new file must be written in the order of their offsets."""

    @property
    def parallel(self) -> int:
        """The number of small requests (for a manifest, a header) that should be in progress at the same time."""

    def hold(self) -> bool:
        """Protect the attempt from removal until ``close``. Return False if another process is removing the attempt."""

    def names(self) -> list[str]:
        """Return the names of all finished files of the attempt, sorted.

        Raises:
            CheckpointInvalid: the names cannot be read.
        """

    def exists(self, name: str) -> bool:
        """Return True if the attempt has an entry of this name.

        Raises:
            CheckpointInvalid: the names cannot be read.
        """

    def open_file(self, name: str) -> SourceFile:
        """Open a file of the attempt for reading.

        Raises:
            CheckpointInvalid: the file is missing, or is not a regular file.
        """

    def read(self, name: str, size_bytes_max: int) -> bytes:
        """Return the content of a file of the attempt.

        Raises:
            CheckpointInvalid: the file is missing, is not a regular file, or is larger than ``size_bytes_max``.
        """

    def write(self, name: str, data: bytes, owner: str) -> None:
        """Write a file, which appears only when it is complete and durable. An existing file of this name is replaced.

        Raises:
            StoreWriteError: the file cannot be written.
        """

    def create(self, name: str, data: bytes, owner: str, *, later: bool = False) -> bool:
        """Write a file unless one of this name exists. Return False if it exists.

        Args:
            name, data: the name and the content of the file.
            owner: text that differs between the processes that may write this file.
            later: if True, the file need not appear before the next :meth:`publish` returns.
        """

    def new_file(
        self, name: str, owner: str, *, size_bytes: int, direct: bool = False
    ) -> AbstractContextManager[Put]:
        """Yield a function that writes a new file piece by piece.

        The file appears at the end of the ``with`` block, or when :meth:`publish` is called.

        Args:
            name: the name of the file.
            owner: text that differs between the processes that may write this file.
            size_bytes: total size of the file.
            direct: write past the page cache, in the order of the offsets. Only a local directory does this.

        Raises:
            StoreWriteError: the file cannot be written; nothing visible has changed.
        """

    def publish(self) -> None:
        """Make the new files appear under their names, in the order in which they were made.

        After a loss of power some of these files may be missing. Each file that exists has its complete content.

        Raises:
            StoreWriteError: a file cannot be written.
        """

    def sync(self) -> None:
        """Publish the new files, and make all files of the attempt durable: they then survive a loss of power.

        Raises:
            StoreWriteError: a file cannot be written.
        """


class Store(Protocol):
    """A directory, bucket or memory that holds attempts by name."""

    @property
    def path(self) -> Place:
        """The path or URL of the store."""

    def names(self) -> list[str]:
        """Return the names of all entries of the store; empty if the store does not exist.

        Raises:
            CheckpointInvalid: the names cannot be read.
        """

    def open(self, name: str) -> Attempt:
        """Open an existing attempt.

        Raises:
            CheckpointInvalid: the attempt does not exist.
        """

    def create(self, name: str) -> Attempt:
        """Open an attempt, and make it if it is missing. A new attempt is durable after its first :meth:`Attempt.sync`.

        Raises:
            StoreWriteError: the attempt cannot be made.
        """

    def age_s(self, name: str) -> float:
        """Return the seconds since a file was last added to an attempt; infinity if the attempt does not exist.

        Raises:
            CheckpointInvalid: the age cannot be read.
        """

    def remove(self, name: str) -> bool:
        """Remove an attempt. Return False if another process reads or writes it.

        From the start of this call on, :meth:`names` does not list the attempt.

        Raises:
            StoreWriteError: the attempt cannot be removed.
        """

    def sweep(self) -> None:
        """Finish removals of attempts that a crash interrupted.

        Raises:
            StoreWriteError: an entry cannot be removed.
        """

    def probe(self) -> None:
        """Test whether attempts can be written to this store.

        Raises:
            StoreWriteError: attempts cannot be written.
        """
