"""Early report of a worker's death: a robust lock in its status page is released before its memory is freed.

Theory. A pidfd becomes readable, and sockets are closed, only when a process is completely gone. With a few hundred MB
of memory that takes the kernel 30 to 40 ms. When a thread ends, one of the kernel's first acts is to hand over the
thread's robust locks (pthread_mutexattr_setrobust(3)). A waiter for such a lock wakes up within a fraction of a
millisecond. So the worker's main thread holds such a lock for its whole life, and a thread of the agent waits for it.

Invariants:
1. A worker takes its lock once, in its main thread, and never releases it: the mapping stays until the process ends.
2. The release of the lock is only a hint, because ``exec`` releases it as well. ``process_info.ending`` then shows
   whether the process exits.
3. If the lock was never taken, nothing is reported here; the pidfd still reports the death.
"""

from __future__ import annotations

import ctypes
import mmap
import threading
from collections.abc import Callable
from errno import ENOTRECOVERABLE, EOWNERDEAD
from pathlib import Path

from holdfast.core.protocol.status_page import LOCK_AT, LOCK_SIZE_BYTES, PAGE_SIZE_BYTES

_ROBUST = _SHARED = 1  # in every C library of Linux
_ENDED = (EOWNERDEAD, ENOTRECOVERABLE)  # the second, if an earlier waiter got the first
_ATTRIBUTES_SIZE_BYTES = 64
_held: list[ctypes.Array[ctypes.c_char]] = []  # never unmapped: the kernel reads them when the process ends


def hold(page: Path) -> None:
    """Take the lock in this worker's status page for the life of the calling thread, which should be the main thread.

    Raises:
        OSError: the page cannot be mapped.
    """
    libc, lock = ctypes.CDLL(None), _mapped(page)
    attributes = ctypes.create_string_buffer(_ATTRIBUTES_SIZE_BYTES)
    _held.append(lock)
    libc.pthread_mutexattr_init(attributes)
    libc.pthread_mutexattr_setpshared(attributes, _SHARED)
    libc.pthread_mutexattr_setrobust(attributes, _ROBUST)
    libc.pthread_mutex_init(lock, attributes)
    libc.pthread_mutex_lock(lock)


def listen(page: Path, ended: Callable[[], None]) -> None:
    """Call ``ended`` in a new thread when the thread that holds the lock of ``page`` has ended.

    Raises:
        OSError: the page cannot be mapped.
    """
    lock = _mapped(page)

    def wait() -> None:
        libc = ctypes.CDLL(None)
        result = libc.pthread_mutex_lock(lock)
        libc.pthread_mutex_unlock(lock)
        if result in _ENDED:
            ended()

    threading.Thread(target=wait, name="holdfast-lifeline", daemon=True).start()


def _mapped(page: Path) -> ctypes.Array[ctypes.c_char]:
    with page.open("r+b") as file:
        mapping = mmap.mmap(file.fileno(), PAGE_SIZE_BYTES)
    return (ctypes.c_char * LOCK_SIZE_BYTES).from_buffer(mapping, LOCK_AT)
