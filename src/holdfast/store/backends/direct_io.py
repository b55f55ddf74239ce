"""Writes past the page cache, so that a background save takes little processor time and memory from the training.

Theory. A buffered write copies the data into the page cache, and waits there for the dirty pages of all processes. On a
busy machine this wait takes most of a write's time. With O_DIRECT the disk reads from the memory of this process. The
memory address, the file offset and the length must then be multiples of 4096 bytes. Data with such an address and
offset is written directly from its memory. Other data is copied through one small aligned buffer. The last write is
padded to 4096 bytes, and the file is then truncated to its size.

Invariants:
1. After :meth:`DirectFile.finish` the file holds exactly the bytes given to :meth:`DirectFile.put`, in the order of the
   calls.
2. Writes use the page cache on a file system without O_DIRECT, or without a disk of its own (network, memory).
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
from pathlib import Path

from holdfast.errors import InternalError
from holdfast.store.backends.durable_files import write_at, writing

BUFFER_SIZE_BYTES = 4 * 2**20
_ALIGNMENT = 4096


def _address(data: memoryview) -> int:
    import numpy as np  # here, since an agent writes no checkpoint

    return int(np.frombuffer(data, np.uint8).ctypes.data)


class DirectFile:
    """A writer of consecutive bytes into an open file, past the page cache if the file system allows it."""

    def __init__(self, fd: int, path: Path) -> None:
        self._fd = fd
        self._path = path
        self._buffer = memoryview(mmap.mmap(-1, BUFFER_SIZE_BYTES))
        self._held = 0
        self._offset = 0
        self.direct = os.major(os.fstat(fd).st_dev) != 0 and self._switch(on=True)

    def put(self, offset: int, data: memoryview) -> None:
        """Write ``data`` at ``offset``, which must be the end of the data of the previous call (first call: 0).

        Raises:
            StoreWriteError: disk full, size limit reached, input/output error.
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
        """Write the bytes that are still in the buffer, and truncate the file to its real size.

        Raises:
            StoreWriteError: disk full, size limit reached, input/output error.
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
                    self.direct = not self._switch(on=False)  # the disk needs a stricter alignment
                # After a short write (full disk, limit), the buffered write of the rest raises the reason.
                if done % _ALIGNMENT:
                    self.direct = not self._switch(on=False)

    def _switch(self, *, on: bool) -> bool:
        flags = fcntl.fcntl(self._fd, fcntl.F_GETFL)
        try:
            fcntl.fcntl(self._fd, fcntl.F_SETFL, flags | os.O_DIRECT if on else flags & ~os.O_DIRECT)
        except OSError:
            return False
        return True
