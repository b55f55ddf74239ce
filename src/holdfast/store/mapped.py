"""Reading what the page cache has already: copying out of a mapping costs half of what a read call costs.

Theory. A file that was just written or read lies in the page cache in pieces, and the kernel's copy goes from piece to
piece; a mapping is copied at the speed of memory. But an error of the disk under a mapping is not an errno, it is a
SIGBUS. So the pages are mapped by a call that reports errors (``MADV_POPULATE_READ``), and only when the cache seems to
have them; anything else is left to the read call.

Invariants:
1. False or None means that nothing was done: the caller reads, and gets the error if there is one.
2. Between the check and the copy lie microseconds. Only a page that is evicted in them, and that the disk then fails to
   give again, ends the process: as any crash, by a restart.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from functools import cache

import numpy as np
from numpy.typing import NDArray

SIZE_BYTES_MIN = 256 * 1024
_POPULATE_READ = 22


class Mapped:
    """The mapping of one open file of ``size_bytes``; made at its first use."""

    def __init__(self, fd: int, size_bytes: int) -> None:
        self._fd = fd
        self._size_bytes = size_bytes
        self._pages: NDArray[np.uint8] | None = None

    def copy(self, offset: int, buffers: list[memoryview]) -> bool:
        """Fill ``buffers`` from ``offset`` on, when all of it is in memory; from several threads at once."""
        data = self.view(offset, sum(len(buffer) for buffer in buffers))
        if data is None:
            return False
        done = 0
        for buffer in buffers:
            # numpy copies without the interpreter lock
            np.copyto(
                np.frombuffer(buffer, np.uint8), np.frombuffer(data[done : done + len(buffer)], np.uint8)
            )
            done += len(buffer)
        return True

    def view(self, offset: int, size_bytes: int) -> memoryview | None:
        """The bytes where they are, for use at once; None when they are not all in memory."""
        end = offset + size_bytes
        if size_bytes < SIZE_BYTES_MIN or end > self._size_bytes or not self._is_cached(end - 1):
            return None
        try:
            if self._pages is None:
                self._pages = np.frombuffer(mmap.mmap(self._fd, 0, prot=mmap.PROT_READ), np.uint8)
            pages = self._pages
        except (OSError, ValueError):  # a file system without mappings, or the file is empty by now
            return None
        start = offset // mmap.PAGESIZE * mmap.PAGESIZE
        if end > len(pages) or not _populate(pages.ctypes.data + start, end - start):
            return None
        return pages.data[offset:end]

    def _is_cached(self, at: int) -> bool:
        try:
            return os.preadv(self._fd, [bytearray(1)], at, os.RWF_NOWAIT) == 1
        except OSError:
            return False


@cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None)


def _populate(address: int, size_bytes: int) -> bool:
    """Map the pages; False when one cannot be had, or the kernel is older than 5.14."""
    result: int = _libc().madvise(
        ctypes.c_void_p(address), ctypes.c_size_t(size_bytes), ctypes.c_int(_POPULATE_READ)
    )
    return result == 0
