"""The writer process of one worker: it writes the staged data of the worker, and survives the worker.

``python -m holdfast.store.write.writer_process SOCKET_FD POOL_FD WORKER_PID`` is started by
``store/write/async_save.py`` in a separate process session. It executes one *order* (the message to write one save)
after the other. When the worker has ended (its socket is closed, or its process is gone), the writer executes an order
that is still in the socket, and then ends. It begins an order while the worker still copies the tensors. If the worker
ends before all tensors are copied, the order is dropped, and no manifest names the written data. The writer ignores
SIGINT, SIGTERM and SIGHUP: the worker handles them, and a writer that ended would lose a save that is nearly done.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import sys

import msgspec

from holdfast.errors import HoldfastError, InternalError
from holdfast.store.format.json_values import decode_mapping, decode_values
from holdfast.store.layouts.layout import Catalogue
from holdfast.store.layouts.save_plan import SavePlan
from holdfast.store.write.staging import (
    MESSAGE_SIZE_BYTES_MAX,
    Arrived,
    PoolReader,
    SaveJob,
    SaveOutcome,
    StagedSave,
    Wait,
    Withdrawn,
)
from holdfast.store.write.writer import WrittenShare, write_share


class Dropped(Exception):
    """The error raised if the remaining bytes of an order (a save to write) will not arrive."""


class WorkerLine:
    """The writer's connection to its worker. It returns all messages of the worker, also after the worker has ended."""

    def __init__(self, line: socket.socket, worker_pid: int) -> None:
        self._line = line
        self._worker = watch(worker_pid)
        self._poller = select.poll()
        self._poller.register(line, select.POLLIN)
        if self._worker is not None:
            self._poller.register(self._worker, select.POLLIN)

    def receive(self) -> StagedSave | Arrived | Withdrawn | None:
        """Wait for the next message of the worker, and return it. Return None if no further message will arrive."""
        # Messages that the worker sent before it died are still in the socket, so the socket comes first.
        ready = [fd for fd, _ in self._poller.poll(0 if self._worker is None else None)]
        if self._line.fileno() not in ready or not (data := self._line.recv(MESSAGE_SIZE_BYTES_MAX)):
            return None
        return msgspec.msgpack.decode(data, type=StagedSave | Arrived | Withdrawn)

    def tell(self, outcome: SaveOutcome) -> None:
        """Send the outcome of an order to the worker.

        Raises:
            BrokenPipeError, ConnectionResetError: the worker has ended.
        """
        self._line.send(msgspec.msgpack.encode(outcome), socket.MSG_NOSIGNAL)


class Arrivals:
    """The number of bytes of an order that have arrived in the pool, the shared memory of worker and writer."""

    def __init__(self, line: WorkerLine, order: StagedSave) -> None:
        self._line = line
        self._number = order.number
        self._size_bytes = order.arrived_size_bytes

    def wait(self, size_bytes: int) -> None:
        """Wait until the first ``size_bytes`` bytes of the pool have arrived. Only one thread at a time may wait.

        Raises:
            Dropped: the remaining bytes will not arrive.
        """
        while self._size_bytes < size_bytes:
            message = self._line.receive()
            if not isinstance(message, Arrived) or message.number != self._number:
                raise Dropped
            self._size_bytes = message.size_bytes


def run_job(job: SaveJob, pool: PoolReader, wait: Wait) -> WrittenShare:
    """Write the share of a save that ``job`` describes. ``wait`` waits for bytes of the pool (the shared memory).

    Raises:
        StateError, StoreWriteError: the share cannot be written (see :func:`write_share`).
        CheckpointInvalid: the values of ``job`` are not valid.
    """
    plan = SavePlan(job.sources, job.copies, {job.rank: job.items()}, (), ())
    return write_share(
        job.root,
        job.save_id,
        Catalogue.from_json(job.catalogue),
        plan,
        job.rank,
        pool.source(job, wait),
        decode_mapping(job.values),
        {rank: decode_values(data, f"locals of rank {rank}") for rank, data in job.locals_.items()},
        threads=job.threads,
        direct=True,
    )


def obey(order: StagedSave, pool: PoolReader, wait: Wait) -> SaveOutcome:
    """Execute one order (a save to write) and return its outcome. ``wait`` waits for bytes of the pool.

    Raises:
        Dropped: the remaining bytes of the order will not arrive.
    """
    result: WrittenShare | HoldfastError
    try:
        result = run_job(pool.job(order), pool, wait)
    except HoldfastError as error:
        result = error
    except Dropped:
        raise
    except Exception as error:
        result = InternalError(f"the writer failed: {type(error).__name__}: {error}")
    return SaveOutcome.of(order.number, result)


def serve(line: WorkerLine, pool: PoolReader) -> None:
    """Execute the orders of a worker until the worker has ended and no order is left."""
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        while (message := line.receive()) is not None:
            # After an order that failed early, messages about its remaining bytes may still come.
            if isinstance(message, StagedSave):
                with contextlib.suppress(Dropped):
                    line.tell(obey(message, pool, Arrivals(line, message).wait))


def watch(worker_pid: int) -> int | None:
    """Return a descriptor that becomes readable when the worker ends; None if the worker has already ended."""
    try:
        fd = os.pidfd_open(worker_pid)
    except ProcessLookupError:
        return None
    if os.getppid() != worker_pid:  # the worker ended, and its id may belong to another process by now
        os.close(fd)
        return None
    return fd


def main(argv: list[str]) -> int:
    """Run one writer process. Return its exit code.

    ``argv`` are the descriptors of the socket and of the pool, and the process id of the worker.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    line_fd, pool_fd, worker_pid = (int(argument) for argument in argv)
    with socket.socket(fileno=line_fd) as line:
        serve(WorkerLine(line, worker_pid), PoolReader(pool_fd))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
