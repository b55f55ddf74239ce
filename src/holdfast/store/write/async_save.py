"""Saves in the background: a rank's share is copied into shared memory, and another process writes it during training.

Theory. A save delays the step by one memory copy of this rank's share (not of its whole state). The memory is reused,
since a copy into fresh pages costs several times as much. The writer process gets its order before the copy and begins
to write when most bytes have arrived. The manifest is written only after all bytes were copied. The writer runs in a
separate process session. When this worker is killed, the writer finishes the save in progress and ends. When the writer
is killed, a new writer writes the same share from the same memory. One save is in progress at a time: when the disk is
slower than the save interval, the next save is delayed (``busy``), never the training step.

Invariants:
1. A save contains the state at the time of the call of ``save``. That call copies all tensors and encodes all values.
2. Every accepted save ends in exactly one call of ``done`` (the caller's function), from the thread that waits for the
   writer.
3. From the moment ``save`` returns, the checkpoint does not need this process any more.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from queue import SimpleQueue
from typing import NamedTuple, Protocol, Self, runtime_checkable

import msgspec
import numpy as np

from holdfast.core.ids import SaveId
from holdfast.errors import HoldfastError, InternalError, StoreWriteError
from holdfast.package import DIRECTORY
from holdfast.store.backends.interfaces import Closes
from holdfast.store.backends.location import Place
from holdfast.store.format.json_values import encode_values
from holdfast.store.layouts.layout import DTYPE_SIZE_BYTES, Box, Catalogue
from holdfast.store.layouts.save_plan import SavePlan, WriteItem
from holdfast.store.write.staging import (
    MESSAGE_SIZE_BYTES_MAX,
    Arrived,
    Pin,
    Pool,
    SaveJob,
    SaveOutcome,
    StagedPart,
    StagedSave,
    Withdrawn,
)
from holdfast.store.write.writer import TensorSource, WrittenShare, files_of, part_bytes

log = logging.getLogger("holdfast")

WRITERS_MAX = 3
END_TIMEOUT_S = 10.0
ARRIVED_SIZE_BYTES_MIN = 16 * 2**20
# The copied fraction at which writing begins. With an earlier begin, copying and writing share the memory's
# bandwidth, and the step waits a fifth longer.
ARRIVED_FROM = 0.75
ARRIVED_MAX = 32
"""Limit of the ``Arrived`` messages per save. All of them must fit into the socket, even if the writer reads none."""
_ALIGNMENT = 4096

Done = Callable[[SaveId, WrittenShare | HoldfastError], None]


@runtime_checkable
class DeviceSource(TensorSource, Protocol):
    """A provider of the bytes of tensors that copies them directly from their device (a GPU)."""

    def copy_to(self, fqn: str, box: Box, start: int, stop: int, goal: memoryview) -> None:
        """Begin to copy the bytes ``start`` to ``stop`` of one box to ``goal``."""

    def finish_copies(self) -> None:
        """Wait until all copies that :meth:`copy_to` began have ended."""


class Staged(msgspec.Struct, frozen=True):
    """The cost of one call of :meth:`BackgroundSaver.save`.

    Attributes:
        size_bytes: number of copied bytes.
        stall_s: duration of the copy in seconds.
        waited_s: seconds of waiting for the previous save, before the copy.
    """

    size_bytes: int
    stall_s: float
    waited_s: float


class WriterProcess:
    """The worker's handle of its writer process (``store/write/writer_process.py``). :meth:`start` makes it."""

    def __init__(self, process: subprocess.Popen[bytes], line: socket.socket, end_fd: int) -> None:
        self.pid = process.pid
        self._process = process
        self._line = line
        self._end = end_fd
        self._poller = select.poll()
        for fd in (line.fileno(), end_fd):
            self._poller.register(fd, select.POLLIN)

    @classmethod
    def start(cls, pool_fd: int) -> Self:
        """Start a writer process that reads the pool (the shared memory) of the descriptor ``pool_fd``.

        The call does not wait for the interpreter of the writer to start.

        Raises:
            StoreWriteError: the host has no process, memory or descriptor left for a writer. The call has then changed
                nothing.
        """
        with contextlib.ExitStack() as undo:
            try:
                line, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                undo.enter_context(line)
                with other:
                    process = _popen(other.fileno(), pool_fd)
                undo.callback(process.wait)
                undo.callback(process.kill)
                writer = cls(process, line, os.pidfd_open(process.pid))
            except OSError as error:
                raise StoreWriteError(
                    f"no process can be started that writes the checkpoint: {error.strerror or error}",
                    hint="look at the memory of this machine, and at its limits of processes and files (ulimit -a)",
                ) from error
            undo.pop_all()
        return writer

    def tell(self, message: StagedSave | Arrived | Withdrawn) -> None:
        """Send a message to the writer without blocking. If the writer has ended, :meth:`answer` returns None."""
        try:
            self._line.send(msgspec.msgpack.encode(message), socket.MSG_NOSIGNAL | socket.MSG_DONTWAIT)
        except (BrokenPipeError, ConnectionResetError):
            return

    def answer(self, number: int) -> SaveOutcome | None:
        """Wait for the outcome of order ``number``. Return None if the writer ended without an outcome."""
        while True:
            ready = [fd for fd, _ in self._poller.poll()]
            data = self._receive() if self._line.fileno() in ready else b""
            if not data:
                return None
            outcome = msgspec.msgpack.decode(data, type=SaveOutcome)
            if outcome.number == number:
                return outcome

    def end(self) -> str:
        """Close the socket, which ends an idle writer, and wait for the process. Return how it ended, as text.

        A second call is harmless.
        """
        if self._line.fileno() >= 0:
            self._line.close()
            os.close(self._end)
        try:
            code = self._process.wait(END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            code = self._process.wait()
        return f"killed by signal {-code}" if code < 0 else f"exit code {code}"

    def _receive(self) -> bytes:
        try:
            return self._line.recv(MESSAGE_SIZE_BYTES_MAX)
        except ConnectionResetError:
            return b""


def _popen(line_fd: int, pool_fd: int) -> subprocess.Popen[bytes]:
    path = [str(DIRECTORY.parent), os.environ.get("PYTHONPATH", "")]
    # Popen closes every other descriptor: a writer that outlives its worker must not hold its connections open.
    return subprocess.Popen(
        [
            sys.executable,
            "-P",
            "-m",
            "holdfast.store.write.writer_process",
            str(line_fd),
            str(pool_fd),
            str(os.getpid()),
        ],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, path))},
        pass_fds=(line_fd, pool_fd),
        start_new_session=True,
    )


class BackgroundSaver(Closes):
    """The background saves of one rank, one at a time (a context manager)."""

    def __init__(self, done: Done, *, threads: int = 1, pin: Pin | None = None) -> None:
        """Prepare the saver.

        Args:
            done: called with the result of each save (the written share, or the error), in the thread that waits for
                the writer.
            threads: extents hashed and written at the same time.
            pin: makes the shared memory fast to copy into (see ``staging.Pin``).
        """
        self._done = done
        self._threads = threads
        self._pin = pin
        self._jobs: SimpleQueue[tuple[SaveId, WriterProcess, StagedSave] | None] = SimpleQueue()
        self._idle = threading.Event()
        self._idle.set()
        self._thread: threading.Thread | None = None
        self._orders = 0
        self._placed: _Placed | None = None  # of the previous save; reused until the layout changes
        self._writer: WriterProcess | None = None  # started by the first save: most restarts never need one

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as undo:
            self._pool = undo.enter_context(Pool.open(self._pin))
            thread = threading.Thread(target=self._watch, name="holdfast-save", daemon=True)
            thread.start()
            undo.pop_all()
        self._thread = thread
        return self

    @property
    def busy(self) -> bool:
        """True while a save is in progress: a policy then delays the next periodic save."""
        return not self._idle.is_set()

    @property
    def writer_pid(self) -> int:
        """The process id of the writer; 0 while there is none. A writer that is killed is replaced by a new process."""
        writer = self._writer
        return 0 if writer is None else writer.pid

    @property
    def pool_size_bytes(self) -> int:
        """Size in bytes of the shared memory for copies, which is kept from the first save on."""
        return self._pool.size_bytes

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until no save is in progress, for at most ``timeout_s`` seconds. None sets no limit.

        Return False if a save is still in progress then.
        """
        return self._idle.wait(timeout_s)

    def close(self) -> None:
        """Finish the save in progress and end the writer. A second call is harmless."""
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join()
            self._thread = None
            if self._writer is not None:
                self._writer.end()
            self._pool.close()

    def save(
        self,
        root: Place | str,
        save_id: SaveId,
        catalogue: Catalogue,
        plan: SavePlan,
        rank: int,
        source: TensorSource,
        values: Mapping[str, object],
        locals_: Mapping[int, object],
    ) -> Staged:
        """Copy this rank's share into shared memory for the writer process, and return when all of it is copied.

        If the previous save is in progress, the call first waits for its end. The arguments are as in
        :func:`write_share`: the root, the save's id and plan, all tensors, this rank, and the state to save.

        Raises:
            StateError: a value cannot be saved, or ``source`` gives another number of bytes than a box has. No save is
                in progress then.
            StoreWriteError: there is no memory for the copy, or no process to write it. No save is in progress then.
        """
        if self._thread is None:
            raise InternalError("BackgroundSaver is used outside its with block")
        started_s = time.perf_counter()
        self._idle.wait()
        copied_s = time.perf_counter()
        placed = self._placed
        if placed is None or not placed.is_for(catalogue, plan, rank):
            placed = self._placed = _placed(catalogue, plan, rank)
        job = SaveJob(
            root=str(root),
            save_id=save_id,
            catalogue=catalogue.to_json(),
            sources=plan.sources,
            copies=plan.copies,
            rank=rank,
            parts=placed.parts,
            values=encode_values(dict(values)),
            locals_={r: encode_values(v, f"locals of rank {r}") for r, v in locals_.items()},
            threads=self._threads,
        )
        self._idle.clear()
        try:
            self._hand_over(save_id, job, placed, source)
        except BaseException:
            self._idle.set()
            raise
        copied = sum(part.size_bytes for part in placed.parts)
        return Staged(copied, time.perf_counter() - copied_s, copied_s - started_s)

    def _hand_over(self, save_id: SaveId, job: SaveJob, placed: _Placed, source: TensorSource) -> None:
        size_bytes = placed.size_bytes
        description = msgspec.msgpack.encode(job)
        memory = self._pool.memory(size_bytes + len(description))
        memory[size_bytes : size_bytes + len(description)] = description
        self._orders += 1
        order = StagedSave(self._orders, size_bytes, len(description), self._pool.size_bytes, 0)
        if self._writer is None:
            self._writer = WriterProcess.start(self._pool.fd)
        self._writer.tell(order)
        try:
            for arrived in _stage(memory, zip(placed.items, placed.parts, strict=True), source, size_bytes):
                self._writer.tell(Arrived(order.number, arrived))
        except BaseException:
            self._writer.tell(Withdrawn(order.number))
            raise
        # A new writer that replaces this one finds all bytes in the pool.
        again = msgspec.structs.replace(order, arrived_size_bytes=size_bytes)
        self._jobs.put((save_id, self._writer, again))

    # ------------------------------------------------------------ watching thread

    def _watch(self) -> None:
        while (job := self._jobs.get()) is not None:
            save_id, writer, order = job
            try:
                self._done(save_id, self._result(writer, order))
            # Without this thread no later save would end, and the training would wait for ever.
            except Exception:
                log.exception("holdfast: after the save of step %d", save_id.step)
            finally:
                self._idle.set()

    def _result(self, writer: WriterProcess, order: StagedSave) -> WrittenShare | HoldfastError:
        """Return the result of an order. A writer that dies is replaced, and the new one gets the same order."""
        how: list[str] = []
        while True:
            outcome = writer.answer(order.number)
            if outcome is not None:
                return outcome.result()
            how.append(writer.end())
            self._writer = None  # the next save starts another one, if possible
            ended = f"{len(how)} writer processes ended one after the other ({', '.join(how)})"
            if len(how) == WRITERS_MAX:
                return StoreWriteError(
                    f"the checkpoint is not written: {ended}",
                    hint="see the log of this rank; was the machine out of memory?",
                )
            try:
                writer = self._writer = WriterProcess.start(self._pool.fd)
            except StoreWriteError as error:
                return StoreWriteError(
                    f"the checkpoint is not written: {ended}, then {error.message}", hint=error.hint
                )
            writer.tell(order)


def _stage(
    memory: memoryview, parts: Iterable[tuple[WriteItem, StagedPart]], source: TensorSource, size_bytes: int
) -> Iterator[int]:
    """Copy ``parts`` to their offsets in shared memory. Yield the number of copied bytes several times near the end."""
    step = max(ARRIVED_SIZE_BYTES_MIN, size_bytes // (ARRIVED_MAX - 1))
    said = int(ARRIVED_FROM * size_bytes) - step
    device = source if isinstance(source, DeviceSource) else None
    for item, part in parts:
        if not part.size_bytes:
            continue
        item_size_bytes = part.size_bytes // part.part.numel
        end = part.start + part.size_bytes
        goal = memory[part.start : end]
        if device is not None:
            device.copy_to(item.fqn, item.box, *item.byte_range(item_size_bytes), goal)
            continue
        data = part_bytes(item, source, item_size_bytes)
        # numpy copies without the interpreter lock, slice assignment of a memoryview holds it
        np.copyto(np.frombuffer(goal, np.uint8), np.frombuffer(data, np.uint8))
        if end - said >= step and end < size_bytes:
            yield end
            said = end
    if device is not None:
        device.finish_copies()
    yield size_bytes


class _Placed(NamedTuple):
    """The boxes of a share in the order of its files, with their offsets in the pool, and the total size in bytes."""

    catalogue: Catalogue
    plan: SavePlan
    rank: int
    items: tuple[WriteItem, ...]
    parts: tuple[StagedPart, ...]
    size_bytes: int

    def is_for(self, catalogue: Catalogue, plan: SavePlan, rank: int) -> bool:
        """Return True if this share was placed for the same catalogue, plan and rank.

        Objects are compared by identity, because a comparison of plans would take as long as placing a share.
        """
        return self.catalogue is catalogue and self.plan is plan and self.rank == rank


def _placed(catalogue: Catalogue, plan: SavePlan, rank: int) -> _Placed:
    """Return the boxes of a share with their offsets in the pool (the shared memory).

    The boxes are in the order of the files. Each file begins at a page, so that the disk can read directly from the
    pool.
    """
    items: list[WriteItem] = []
    parts: list[StagedPart] = []
    end = 0
    for group in files_of(plan.items(rank), catalogue):
        end = -(-end // _ALIGNMENT) * _ALIGNMENT
        for item in group:
            size_bytes = item.part.numel * DTYPE_SIZE_BYTES[catalogue.by_fqn[item.fqn].dtype]
            items.append(item)
            parts.append(StagedPart(item.fqn, item.part, end, size_bytes))
            end += size_bytes
    return _Placed(catalogue, plan, rank, tuple(items), tuple(parts), end)
