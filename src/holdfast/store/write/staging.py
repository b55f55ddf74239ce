"""The shared memory (pool) between a worker and its writer process, the description of a save in it, and the messages.

Theory. Worker and writer share one anonymous file in memory and one socket. The file is a memfd: it has no name, no
other process can open it, and it vanishes when both processes have closed it. All large data is in the file: the copied
tensors, and after them the description of the save (:class:`SaveJob`). A message contains only offsets into the file.
So a save of any size takes a few short, non-blocking sends. The order (:class:`StagedSave`) is sent before the tensors
are copied. The writer begins with the bytes that have arrived while the worker still copies the others.

Invariants:
1. The worker writes only to bytes of the pool that no message has announced. The writer never writes to the pool.
2. No field of the description is trusted: offsets are checked against the size of the pool, lengths against limits.
3. A pool that has grown is still the same file: worker and writer map it again, longer.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Self

import msgspec

from holdfast import errors
from holdfast.core.ids import SaveId
from holdfast.errors import HoldfastError, InternalError, StoreWriteError
from holdfast.store.backends.interfaces import Closes
from holdfast.store.layouts.layout import Box
from holdfast.store.layouts.save_plan import WriteItem
from holdfast.store.write.writer import WrittenShare

MESSAGE_SIZE_BYTES_MAX = 64 * 1024
TEXT_LENGTH_MAX = 8 * 1024

Wait = Callable[[int], None]
"""Function that returns when the given number of bytes, from the start of the pool, have arrived."""

Pin = Callable[[memoryview], Callable[[], None]]
"""Function that makes memory fast to copy into (page-locked, for a GPU). It returns the function that undoes this."""


class StagedPart(msgspec.Struct, frozen=True, array_like=True):
    """A box of a tensor that this rank writes, and the offset and size of its bytes in the pool (the shared memory)."""

    fqn: str
    part: Box
    start: int
    size_bytes: int


class SaveJob(msgspec.Struct, frozen=True):
    """The description of one share to write. ``catalogue``, ``values`` and ``locals_`` are JSON as in a checkpoint."""

    root: str
    save_id: SaveId
    catalogue: bytes
    sources: tuple[int, ...]
    copies: int
    rank: int
    parts: tuple[StagedPart, ...]
    values: bytes
    locals_: dict[int, bytes]
    threads: int

    def items(self) -> tuple[WriteItem, ...]:
        """Return the share of this rank as items of a save plan, one item for each of ``parts``."""
        return tuple(WriteItem(p.fqn, p.part, p.part) for p in self.parts)


class StagedSave(msgspec.Struct, frozen=True, tag="order"):
    """Message to the writer, the order to write a save. It has the offset and size of a :class:`SaveJob` in the pool.

    ``arrived_size_bytes`` is the number of tensor bytes that are already in the pool.
    """

    number: int
    start: int
    size_bytes: int
    pool_size_bytes: int
    arrived_size_bytes: int


class Arrived(msgspec.Struct, frozen=True, tag="arrived"):
    """Message to the writer: the first ``size_bytes`` bytes of save ``number`` are in the pool (the shared memory)."""

    number: int
    size_bytes: int


class Withdrawn(msgspec.Struct, frozen=True, tag="withdrawn"):
    """Message to the writer: the remaining bytes of save ``number`` will not arrive, and its outcome is not awaited."""

    number: int


class SaveOutcome(msgspec.Struct, frozen=True):
    """Message to the worker: the outcome of save ``number``. ``failed`` is the name of an error class, or empty."""

    number: int
    sealed: bool = False
    size_bytes: int = 0
    duration_s: float = 0.0
    failed: str = ""
    message: str = ""
    hint: str = ""

    @staticmethod
    def of(number: int, result: WrittenShare | HoldfastError) -> SaveOutcome:
        """Return the message for the result of save ``number``: the written share or the error."""
        if isinstance(result, WrittenShare):
            return SaveOutcome(number, result.sealed, result.size_bytes, result.duration_s)
        name = type(result).__name__
        return SaveOutcome(
            number,
            failed=name,
            message=result.message[:TEXT_LENGTH_MAX],
            hint=result.hint[:TEXT_LENGTH_MAX],
        )

    def result(self) -> WrittenShare | HoldfastError:
        """Return the written share or the error that this message reports. The share lacks the names of the files."""
        if not self.failed:
            return WrittenShare(self.sealed, self.size_bytes, self.duration_s, ())
        kind = getattr(errors, self.failed, None)
        if not (isinstance(kind, type) and issubclass(kind, HoldfastError)):
            return InternalError(f"{self.failed}: {self.message}")
        return kind(self.message, hint=self.hint)


class Pool(Closes):
    """The worker's writable view of the memory that it shares with its writer (a context manager).

    :meth:`open` makes it.
    """

    def __init__(self, fd: int, pin: Pin | None) -> None:
        self.fd = fd
        self._pin = pin
        self._unpin: Callable[[], None] | None = None
        self._map: mmap.mmap | None = None

    @classmethod
    def open(cls, pin: Pin | None = None) -> Self:
        """Return an empty pool.

        Args:
            pin: function that makes memory fast to copy into. It is called with the whole pool each time the pool is
                mapped.
        """
        return cls(os.memfd_create("holdfast-pool"), pin)

    @property
    def size_bytes(self) -> int:
        """Bytes of shared memory that are allocated."""
        return 0 if self._map is None else len(self._map)

    def memory(self, size_bytes: int) -> memoryview:
        """Return the shared memory, grown to at least ``size_bytes``. Growing makes views from earlier calls invalid.

        Raises:
            StoreWriteError: the host does not have that much memory.
        """
        if self._map is None or len(self._map) < size_bytes:
            wanted = -(-max(size_bytes, 1) // mmap.PAGESIZE) * mmap.PAGESIZE
            self._release()
            try:
                # A lack of memory is an error here. Without this allocation it would be a SIGBUS during the copy.
                os.posix_fallocate(self.fd, 0, wanted)
                self._map = mmap.mmap(self.fd, wanted)
            except OSError as error:
                raise StoreWriteError(
                    f"no memory for a copy of {size_bytes} bytes to save from: {error.strerror}",
                    hint="give the job more host memory, or spread the state over more ranks",
                ) from error
            if self._pin is not None:
                self._unpin = self._pin(memoryview(self._map))
        return memoryview(self._map)

    def close(self) -> None:
        """Release the memory. A second call is harmless."""
        self._release()
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def _release(self) -> None:
        if self._unpin is not None:
            self._unpin()
            self._unpin = None
        self._map = None  # unmapped when the last view is gone


class PoolReader:
    """The writer's read-only view of the memory that it shares with the worker.

    When the memory has grown, :meth:`job` maps it again.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._map: mmap.mmap | None = None

    def job(self, order: StagedSave) -> SaveJob:
        """Return the decoded :class:`SaveJob` whose offset and size in the pool are in ``order``.

        Raises:
            InternalError: the range is outside of the pool, or its bytes are not a :class:`SaveJob`.
        """
        if self._map is None or len(self._map) != order.pool_size_bytes:
            self._map = None
            if order.pool_size_bytes > os.fstat(self._fd).st_size:
                raise InternalError(f"a pool of {order.pool_size_bytes} bytes is larger than its memory")
            self._map = mmap.mmap(self._fd, order.pool_size_bytes, prot=mmap.PROT_READ)
        try:
            job = msgspec.msgpack.decode(self._bytes(order.start, order.size_bytes), type=SaveJob)
        except msgspec.MsgspecError as error:
            raise InternalError(f"not a save job: {error}") from error
        for part in job.parts:
            self._bytes(part.start, part.size_bytes)
        return job

    def source(self, job: SaveJob, wait: Wait) -> StagedSource:
        """Return an object that reads the tensor bytes of the save ``job`` from the pool (the shared memory).

        The object calls ``wait`` before it returns bytes that the worker may still be copying.
        """
        assert self._map is not None
        return StagedSource(memoryview(self._map), {(p.fqn, p.part): p for p in job.parts}, wait)

    def _bytes(self, start: int, size_bytes: int) -> memoryview:
        assert self._map is not None
        if start < 0 or size_bytes < 0 or start + size_bytes > len(self._map):
            raise InternalError(f"{size_bytes} bytes at {start} are outside a pool of {len(self._map)}")
        return memoryview(self._map)[start : start + size_bytes]


class StagedSource:
    """The tensor bytes in the pool, as a ``TensorSource``. A read waits for bytes that have not arrived."""

    def __init__(self, pool: memoryview, parts: dict[tuple[str, Box], StagedPart], wait: Wait) -> None:
        self._pool = pool
        self._parts = parts
        self._wait = wait

    def view(self, fqn: str, box: Box) -> memoryview:
        """Return the bytes of one box in the pool."""
        part = self._parts[fqn, box]
        return StagedRun(self._pool, part.start, part.size_bytes, self._wait).piece(0, part.size_bytes)

    def run(self, items: Sequence[WriteItem]) -> StagedRun | None:
        """Return the bytes of several boxes as one range of the pool.

        The result is None if the bytes are not adjacent in the pool.
        """
        parts = [self._parts[item.fqn, item.part] for item in items]
        if not parts or any(a.start + a.size_bytes != b.start for a, b in pairwise(parts)):
            return None
        size_bytes = parts[-1].start + parts[-1].size_bytes - parts[0].start
        return StagedRun(self._pool, parts[0].start, size_bytes, self._wait)


class StagedRun:
    """A byte range of the pool, as a :class:`~holdfast.store.write.writer.ByteRun`."""

    def __init__(self, pool: memoryview, start: int, size_bytes: int, wait: Wait) -> None:
        self.size_bytes = size_bytes
        self._pool = pool
        self._start = start
        self._wait = wait

    def piece(self, start: int, stop: int) -> memoryview:
        """Return the bytes ``start`` to ``stop`` of this range, after they have arrived in the pool."""
        self._wait(self._start + stop)
        return self._pool[self._start + start : self._start + stop]
