"""The writer process of one worker: writes what the worker staged, and survives it.

``python -m holdfast.store.writerd SOCKET_FD POOL_FD WORKER_PID``, started by ``store/background.py`` in a session of
its own. It takes one order after the other. When the worker is gone (its socket is closed, or its process ended) it
does the order that is still in the socket, if any, and leaves. Signals that end a job politely are answered by the
worker: a writer that obeyed them would drop a save that is nearly done.
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
from holdfast.store.handover import MESSAGE_SIZE_BYTES_MAX, PoolReader, SaveJob, SaveOrder, SaveOutcome
from holdfast.store.layout import Catalogue
from holdfast.store.plan import Plan
from holdfast.store.values import decode_mapping, decode_values
from holdfast.store.writer import Written, write_share


def run_job(job: SaveJob, pool: PoolReader) -> Written:
    """Write the share.

    Raises:
        StateError, StoreWriteError: as :func:`write_share`.
        CheckpointInvalid: the job's values are none.
    """
    plan = Plan(job.sources, job.copies, {job.rank: job.items()}, (), ())
    return write_share(
        job.root,
        job.save_id,
        Catalogue.from_json(job.catalogue),
        plan,
        job.rank,
        pool.source(job),
        decode_mapping(job.values),
        {rank: decode_values(data, f"locals of rank {rank}") for rank, data in job.locals_.items()},
        threads=job.threads,
        direct=True,
    )


def obey(data: bytes, pool: PoolReader) -> SaveOutcome:
    """Carry out one order."""
    order = msgspec.msgpack.decode(data, type=SaveOrder)
    result: Written | HoldfastError
    try:
        result = run_job(pool.job(order), pool)
    except HoldfastError as error:
        result = error
    except Exception as error:
        result = InternalError(f"the writer failed: {type(error).__name__}: {error}")
    return SaveOutcome.of(order.number, result)


def serve(line: socket.socket, pool: PoolReader, worker_pid: int) -> None:
    """Obey until the worker is gone and nothing is left to do."""
    worker = watch(worker_pid)
    poller = select.poll()
    poller.register(line, select.POLLIN)
    if worker is not None:
        poller.register(worker, select.POLLIN)
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # nobody is there to be told
        while True:
            # What the worker said before it died still lies in the socket, so that is looked at first.
            ready = [fd for fd, _ in poller.poll(0 if worker is None else None)]
            if line.fileno() not in ready or not (data := line.recv(MESSAGE_SIZE_BYTES_MAX)):
                return
            line.send(msgspec.msgpack.encode(obey(data, pool)), socket.MSG_NOSIGNAL)


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
        serve(line, PoolReader(pool_fd), worker_pid)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
