"""What the store's code asks of a place that holds checkpoints: a directory, a bucket, or memory.

Theory. A :class:`Store` holds attempts, an :class:`Attempt` holds files with plain names. A file becomes visible whole
or not at all, and stays as it is. Nothing else is common to a file system and an object store: there is no rename,
no lock and no append here, only what saving, judging, loading and pruning need.

Invariants every store keeps:
1. After :meth:`Attempt.write`, :meth:`Attempt.create` (not ``later``) and :meth:`Attempt.sync` returned, what they
   cover survives a loss of power.
2. What is missing or damaged raises :class:`CheckpointInvalid`, what cannot be written :class:`StoreWriteError`,
   both with the place. A store that cannot be asked raises :class:`StoreUnreachable`, also for a single file; where
   this process has no right to ask, :class:`StoreDenied`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Protocol, Self, TypeAlias, runtime_checkable

from holdfast.errors import CheckpointInvalid
from holdfast.store.backends.location import Place

Put: TypeAlias = Callable[[int, memoryview], None]
"""Write these bytes at this offset of a new file. Raises: StoreWriteError."""


class Closes(Protocol):
    """A context manager that is closed at the end of its block."""

    def close(self) -> None:
        """Twice is harmless."""

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
        """Where it is."""

    @property
    def size_bytes(self) -> int:
        """Its size when it was opened."""

    def read_at(self, offset: int, buffers: list[memoryview]) -> None:
        """Fill the buffers one after the other from ``offset`` on; from several threads at once.

        Raises:
            CheckpointInvalid: it ends too early, or cannot be read.
        """


def read_whole(file: SourceFile, size_bytes_max: int) -> bytes:
    """The content of a file. Raises: CheckpointInvalid: as :meth:`SourceFile.read_at`, or larger than the limit."""
    if file.size_bytes > size_bytes_max:
        raise CheckpointInvalid(f"{file.path}: {file.size_bytes} bytes; the limit is {size_bytes_max}")
    buffer = bytearray(file.size_bytes)
    file.read_at(0, [memoryview(buffer)])
    return bytes(buffer)


@runtime_checkable
class Cached(Protocol):
    """What a :class:`SourceFile` may also be: one whose bytes may be in memory already."""

    def read_cached(self, offset: int, buffer: memoryview) -> bool:
        """Fill the buffer without waiting for a disk; False: it holds garbage, and its bytes must be read."""


class Attempt(Closes, Protocol):
    """The files of one attempt to save. ``owner`` tells writers of one name apart. Closed, it is not held any more."""

    @property
    def path(self) -> Place:
        """Where it is."""

    @property
    def in_order(self) -> bool:
        """True when the bytes of a new file must be put one after the other."""

    @property
    def parallel(self) -> int:
        """How many small requests at a time pay off."""

    def hold(self) -> bool:
        """Mark it as being read or written, until it is closed; False when it is being removed."""

    def names(self) -> list[str]:
        """Names of all finished files, sorted. Raises: CheckpointInvalid."""

    def exists(self, name: str) -> bool:
        """True when there is something of this name. Raises: CheckpointInvalid."""

    def open_file(self, name: str) -> SourceFile:
        """Raises: CheckpointInvalid: missing, or no regular file."""

    def read(self, name: str, size_bytes_max: int) -> bytes:
        """The content of a file. Raises: CheckpointInvalid: as :meth:`open_file`, or larger than the limit."""

    def write(self, name: str, data: bytes, owner: str) -> None:
        """Make a file appear whole and durable, also in place of another. Raises: StoreWriteError."""

    def create(self, name: str, data: bytes, owner: str, *, later: bool = False) -> bool:
        """As :meth:`write`, but never in place of another: False when there is one.

        Args:
            later: it need not appear before :meth:`publish` returned.
        """

    def new_file(
        self, name: str, owner: str, *, size_bytes: int, direct: bool = False
    ) -> AbstractContextManager[Put]:
        """A file that is put piece by piece. When the block ends without an error it appears, or in :meth:`publish`.

        Args:
            size_bytes: what will be put in all.
            direct: past the page cache, and in order (a local directory).

        Raises:
            StoreWriteError: it cannot be written; nothing visible has changed.
        """

    def publish(self) -> None:
        """Have new files appear, in the order in which they were made: one that a loss of power leaves behind does
        not promise the others, but has its own content. Raises: StoreWriteError."""

    def sync(self) -> None:
        """Publish what is new, and make all files durable. Raises: StoreWriteError."""


class Store(Protocol):
    """A place that holds attempts by name."""

    @property
    def path(self) -> Place:
        """Where it is."""

    def names(self) -> list[str]:
        """Names of whatever is there; empty when the place does not exist. Raises: CheckpointInvalid."""

    def open(self, name: str) -> Attempt:
        """Raises: CheckpointInvalid: it does not exist."""

    def create(self, name: str) -> Attempt:
        """Open an attempt, made where it is missing; its first sync makes that durable. Raises: StoreWriteError."""

    def age_s(self, name: str) -> float:
        """Seconds since anything was added to an attempt; infinite when it is gone. Raises: CheckpointInvalid."""

    def remove(self, name: str) -> bool:
        """Remove an attempt; it vanishes at once. False when somebody reads or writes it. Raises: StoreWriteError."""

    def sweep(self) -> None:
        """Finish removals that a crash interrupted. Raises: StoreWriteError."""

    def probe(self) -> None:
        """Try whether attempts can be written here. Raises: StoreWriteError."""
