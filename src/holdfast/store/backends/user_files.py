"""Reader of small files that a user names: regular files only, read whole."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path


def read_given(path: Path, size_bytes_max: int) -> bytes:
    """Return the content of a file that a user named. Symbolic links are followed.

    Raises:
        OSError: the file cannot be read, is larger than ``size_bytes_max`` (``EFBIG``), or is not a regular file
            (``EINVAL``, because reading a pipe or a device may never end).
    """
    with open(path, "rb", opener=_without_waiting) as file:
        about = os.fstat(file.fileno())
        if not stat.S_ISREG(about.st_mode):
            raise OSError(errno.EINVAL, "it is no regular file", str(path))
        data = file.read(size_bytes_max + 1)
    if len(data) > size_bytes_max:
        raise OSError(
            errno.EFBIG,
            f"it has {max(about.st_size, len(data))} bytes, at most {size_bytes_max} are read",
            str(path),
        )
    return data


def _without_waiting(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)
