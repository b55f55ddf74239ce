"""Writing past the page cache: what is written beside the training should cost it neither processor nor memory.

Theory. A buffered write copies into the page cache and waits there for everybody else's dirty pages; on a busy machine
that is most of the time. With O_DIRECT the disk reads from our memory. Everything must be aligned for that: data that
lies in memory as it will lie in the file is written from where it is, other data goes through one small aligned buffer;
what is over at the end is written with its padding, and the file cut to size.

Invariants:
1. After :meth:`DirectFile.finish` the file holds exactly the bytes that were put, in order.
2. A file system without O_DIRECT, or one without a disk of its own (network, memory), gets buffered writes.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
from pathlib import Path

import numpy as np

from holdfast.errors import InternalError
from holdfast.store.backends.durable_files import write_at, writing

BUFFER_SIZE_BYTES = 4 * 2**20
_ALIGNMENT = 4096


def _address(data: memoryview) -> int:
    return int(np.frombuffer(data, np.uint8).ctypes.data)


class DirectFile:
    """Puts bytes one after the other into the file of ``fd``; buffered where direct writing is not to be had."""

    def __init__(self, fd: int, path: Path) -> None:
        self._fd = fd
        self._path = path
        self._buffer = memoryview(mmap.mmap(-1, BUFFER_SIZE_BYTES))
        self._held = 0
        self._offset = 0
        self.direct = os.major(os.fstat(fd).st_dev) != 0 and self._switch(on=True)

    def put(self, offset: int, data: memoryview) -> None:
        """Write ``data``, which follows what was put before.

        Raises:
            StoreWriteError: disk full, limit reached, input/output error.
        """
        if offset != self._offset + self._held:
            raise InternalError(f"{self._path}: {offset} does not follow {self._offset + self._held}")
        if not self.direct:
            self._flush(self._held)
            write_at(self._fd, offset, data, self._path)
            self._offset += len(data)
            return
        if self._held % _ALIGNMENT == 0 and len(data) >= _ALIGNMENT and _address(data) % _ALIGNMENT == 0:
            self._flush(self._held)
            whole = len(data) // _ALIGNMENT * _ALIGNMENT
            self._write(data[:whole])
            self._offset += whole
            data = data[whole:]
        while data:
            count = min(len(data), BUFFER_SIZE_BYTES - self._held)
            self._buffer[self._held : self._held + count] = data[:count]
            self._held += count
            data = data[count:]
            if self._held == BUFFER_SIZE_BYTES:
                self._flush(BUFFER_SIZE_BYTES)

    def finish(self) -> None:
        """Write what is left, and give the file its size.

        Raises:
            StoreWriteError: as :meth:`put`.
        """
        if self._held:
            size_bytes = self._offset + self._held
            self._flush(-(-self._held // _ALIGNMENT) * _ALIGNMENT)
            with writing(self._path):
                os.ftruncate(self._fd, size_bytes)

    def _flush(self, size_bytes: int) -> None:
        self._write(self._buffer[:size_bytes])
        self._offset += self._held
        self._held = 0

    def _write(self, data: memoryview) -> None:
        with writing(self._path):
            done = 0
            while done < len(data):
                try:
                    done += os.pwrite(self._fd, data[done:], self._offset + done)
                except OSError as error:
                    if error.errno != errno.EINVAL or not self.direct:
                        raise
                    self.direct = not self._switch(on=False)  # a stricter alignment than ours
                if done % _ALIGNMENT:  # a short write (a full disk, a limit): the rest, buffered, says why
                    self.direct = not self._switch(on=False)

    def _switch(self, *, on: bool) -> bool:
        flags = fcntl.fcntl(self._fd, fcntl.F_GETFL)
        try:
            fcntl.fcntl(self._fd, fcntl.F_SETFL, flags | os.O_DIRECT if on else flags & ~os.O_DIRECT)
        except OSError:
            return False
        return True
