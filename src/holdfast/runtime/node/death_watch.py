"""A worker's death, told while the kernel still takes its memory apart: a robust lock in its status page.

Theory. A pidfd becomes readable, and sockets are closed, when a process has been taken apart; with a few hundred MB of
memory that takes the kernel 30 to 40 ms. What it does first of all is to pass on the robust locks of each thread
(pthread_mutexattr_setrobust(3)): whoever waits for one is woken within a fraction of a millisecond. So the worker's
main thread takes such a lock once and for all, and a thread of the agent waits for it.

Invariants:
1. A worker takes its lock once, in its main thread, and never lets go: the mapping stays until the process ends.
2. That the lock passed on is a hint, for ``exec`` lets go of it, too: ``pids.ending`` decides.
3. Where nobody has taken the lock nothing is told; the pidfd is there in any case.
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
_TOLD = (EOWNERDEAD, ENOTRECOVERABLE)  # the second: somebody else was told before
_ATTRIBUTES_SIZE_BYTES = 64
_held: list[ctypes.Array[ctypes.c_char]] = []  # never unmapped: the kernel looks there when the process ends


def hold(page: Path) -> None:
    """Take the lock in this worker's status page for as long as the calling thread lives, which should be the main one.

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


def listen(page: Path, told: Callable[[], None]) -> None:
    """Have ``told`` called, in a thread of its own, when the thread that holds the lock of ``page`` has ended.

    Raises:
        OSError: the page cannot be mapped.
    """
    lock = _mapped(page)

    def wait() -> None:
        libc = ctypes.CDLL(None)
        result = libc.pthread_mutex_lock(lock)
        libc.pthread_mutex_unlock(lock)
        if result in _TOLD:
            told()

    threading.Thread(target=wait, name="holdfast-lifeline", daemon=True).start()


def _mapped(page: Path) -> ctypes.Array[ctypes.c_char]:
    with page.open("r+b") as file:
        mapping = mmap.mmap(file.fileno(), PAGE_SIZE_BYTES)
    return (ctypes.c_char * LOCK_SIZE_BYTES).from_buffer(mapping, LOCK_AT)
