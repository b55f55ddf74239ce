"""Saving beside the training: copy the share into a warm buffer, release the step, write from a thread.

Theory. A save stalls the step for one memory copy of this rank's share (not of its whole state). The buffer is
reused, since a copy into fresh pages costs several times as much. One save is in flight at a time: when the disk
is slower than the save interval, the next save waits or is put off (``busy``), the training step never is.

Invariants:
1. What is written is the state at the call: tensors are copied and values snapshotted before ``save`` returns.
2. Every accepted save ends in exactly one call of ``done``, from the writer thread.
"""

from __future__ import annotations

import mmap
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from queue import SimpleQueue
from types import TracebackType
from typing import Self

import msgspec
import numpy as np

from holdfast.core.ids import SaveId
from holdfast.errors import HoldfastError, InternalError
from holdfast.store.layout import DTYPE_SIZE_BYTES, Box, Catalogue
from holdfast.store.plan import Plan, WriteItem
from holdfast.store.values import decode_values, encode_values
from holdfast.store.writer import TensorSource, Written, part_bytes, write_share

_ALIGNMENT = 64

Done = Callable[[SaveId, Written | HoldfastError], None]


class Staged(msgspec.Struct, frozen=True):
    """What a call of :meth:`BackgroundSaver.save` cost: the copy, and the wait for the save before it."""

    size_bytes: int
    stall_s: float
    waited_s: float


class StagingBuffer:
    """Copies of the parts that a rank writes, in one reused allocation; a tensor source for the plan it returns."""

    def __init__(self) -> None:
        self._memory: mmap.mmap | None = None
        self._parts: dict[tuple[str, Box], memoryview] = {}

    def stage(self, catalogue: Catalogue, plan: Plan, rank: int, source: TensorSource) -> tuple[Plan, int]:
        """Copy the share of ``rank``; returns the plan that writes it from here, and its size in bytes.

        Raises:
            StateError: the source offers another number of bytes than its box has.
        """
        items = plan.items(rank)
        sizes = [i.part.numel * DTYPE_SIZE_BYTES[catalogue.by_fqn[i.fqn].dtype] for i in items]
        memory = self._grown(sum(-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes))
        self._parts = {}
        offset = 0
        for item, size_bytes in zip(items, sizes, strict=True):
            goal = memory[offset : offset + size_bytes]
            if size_bytes:
                data = part_bytes(item, source, size_bytes // item.part.numel)
                # numpy copies without the interpreter lock, slice assignment of a memoryview holds it
                np.copyto(np.frombuffer(goal, np.uint8), np.frombuffer(data, np.uint8))
            self._parts[item.fqn, item.part] = goal
            offset += -(-size_bytes // _ALIGNMENT) * _ALIGNMENT
        own = tuple(WriteItem(i.fqn, i.part, i.part) for i in items)
        return msgspec.structs.replace(plan, shares={rank: own}), sum(sizes)

    def view(self, fqn: str, box: Box) -> memoryview:
        """Bytes of a staged part (``TensorSource``)."""
        return self._parts[fqn, box]

    def _grown(self, size_bytes: int) -> memoryview:
        if self._memory is None or len(self._memory) < size_bytes:
            self._parts = {}
            self._memory = mmap.mmap(-1, max(size_bytes, mmap.PAGESIZE))
        return memoryview(self._memory)


class BackgroundSaver:
    """Stages and writes checkpoints one at a time (a context manager)."""

    def __init__(self, done: Done, *, threads: int = 1) -> None:
        """Prepare.

        Args:
            done: told the result of each save (what was written, or the typed error), in the writer thread.
            threads: extents hashed and written at the same time.
        """
        self._done = done
        self._threads = threads
        self._buffer = StagingBuffer()
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._idle = threading.Event()
        self._idle.set()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        self._thread = threading.Thread(target=self._work, name="holdfast-save", daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def busy(self) -> bool:
        """True while a save is in flight: a policy puts the next periodic save off."""
        return not self._idle.is_set()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until no save is in flight; False when the time ran out."""
        return self._idle.wait(timeout_s)

    def close(self) -> None:
        """Finish the save in flight and end the thread; twice is harmless."""
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join()
            self._thread = None

    def save(
        self,
        root: Path | str,
        save_id: SaveId,
        catalogue: Catalogue,
        plan: Plan,
        rank: int,
        source: TensorSource,
        values: Mapping[str, object],
        locals_: Mapping[int, object],
    ) -> Staged:
        """Snapshot this rank's share (after the save before it ended) and return; arguments as for ``write_share``.

        Raises:
            StateError: a value cannot be saved, or the source is inconsistent; nothing is in flight then.
        """
        if self._thread is None:
            raise InternalError("BackgroundSaver is used outside its with block")
        started_s = time.perf_counter()
        self._idle.wait()
        copied_s = time.perf_counter()
        common = decode_values(encode_values(dict(values)))
        assert isinstance(common, dict)
        own = {r: decode_values(encode_values(v, f"locals of rank {r}")) for r, v in locals_.items()}
        staged_plan, size_bytes = self._buffer.stage(catalogue, plan, rank, source)
        self._idle.clear()

        def job() -> None:
            result: Written | HoldfastError
            try:
                result = write_share(
                    root,
                    save_id,
                    catalogue,
                    staged_plan,
                    rank,
                    self._buffer,
                    common,
                    own,
                    threads=self._threads,
                )
            except HoldfastError as error:
                result = error
            except Exception as error:
                result = InternalError(f"saving {save_id} failed: {type(error).__name__}: {error}")
                result.__cause__ = error
            self._done(save_id, result)

        self._jobs.put(job)
        ended_s = time.perf_counter()
        return Staged(size_bytes, ended_s - copied_s, copied_s - started_s)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                job()
            finally:
                self._idle.set()
