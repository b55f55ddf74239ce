"""The writer process of one worker: writes what the worker staged, and survives it.

``python -m holdfast.store.write.writer_process SOCKET_FD POOL_FD WORKER_PID``, started by
``store/write/async_save.py`` in a session of its own. It takes one order after the other. When the worker is gone (its
socket is closed, or its process ended) it does the order that is still in the socket, if any, and leaves. It begins an
order while the worker still copies the tensors; when the worker ends before it has copied all of them, the order is
dropped, and no manifest names what was written. Signals that end a job politely are answered by the worker: a writer
that obeyed them would drop a save that is nearly done.
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
    """The rest of an order will not come."""


class WorkerLine:
    """What the worker says, until it is gone and all that it said was read."""

    def __init__(self, line: socket.socket, worker_pid: int) -> None:
        self._line = line
        self._worker = watch(worker_pid)
        self._poller = select.poll()
        self._poller.register(line, select.POLLIN)
        if self._worker is not None:
            self._poller.register(self._worker, select.POLLIN)

    def receive(self) -> StagedSave | Arrived | Withdrawn | None:
        """The next message; None: there will be none."""
        # What the worker said before it died still lies in the socket, so that is looked at first.
        ready = [fd for fd, _ in self._poller.poll(0 if self._worker is None else None)]
        if self._line.fileno() not in ready or not (data := self._line.recv(MESSAGE_SIZE_BYTES_MAX)):
            return None
        return msgspec.msgpack.decode(data, type=StagedSave | Arrived | Withdrawn)

    def tell(self, outcome: SaveOutcome) -> None:
        """Raises: BrokenPipeError, ConnectionResetError: nobody is there to be told."""
        self._line.send(msgspec.msgpack.encode(outcome), socket.MSG_NOSIGNAL)


class Arrivals:
    """How much of an order is in the pool."""

    def __init__(self, line: WorkerLine, order: StagedSave) -> None:
        self._line = line
        self._number = order.number
        self._size_bytes = order.arrived_size_bytes

    def wait(self, size_bytes: int) -> None:
        """Return when so much is there; only one thread at a time may have to wait. Raises: Dropped."""
        while self._size_bytes < size_bytes:
            message = self._line.receive()
            if not isinstance(message, Arrived) or message.number != self._number:
                raise Dropped
            self._size_bytes = message.size_bytes


def run_job(job: SaveJob, pool: PoolReader, wait: Wait) -> WrittenShare:
    """Write the share.

    Raises:
        StateError, StoreWriteError: as :func:`write_share`.
        CheckpointInvalid: the job's values are none.
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
    """Carry out one order. Raises: Dropped."""
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
    """Obey until the worker is gone and nothing is left to do."""
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        while (message := line.receive()) is not None:
            # Of an order that failed early the rest may still be announced.
            if isinstance(message, StagedSave):
                with contextlib.suppress(Dropped):
                    line.tell(obey(message, pool, Arrivals(line, message).wait))


def watch(worker_pid: int) -> int | None:
    """A descriptor that becomes readable when the worker ends; None when it has."""
    try:
        fd = os.pidfd_open(worker_pid)
    except ProcessLookupError:
        return None
    if os.getppid() != worker_pid:  # it ended, and the number may belong to another process by now
        os.close(fd)
        return None
    return fd


def main(argv: list[str]) -> int:
    """Run one writer."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    line_fd, pool_fd, worker_pid = (int(argument) for argument in argv)
    with socket.socket(fileno=line_fd) as line:
        serve(WorkerLine(line, worker_pid), PoolReader(pool_fd))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
