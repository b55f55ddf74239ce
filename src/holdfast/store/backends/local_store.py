"""The store of checkpoints in a directory of this machine, or in a mounted directory of a file server.

Theory. An attempt is a directory. Readers and writers hold an advisory lock on it. A removal begins with a rename of
the directory, so that a half-removed attempt is never listed.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

from holdfast.errors import CheckpointInvalid
from holdfast.store.backends.direct_io import DirectFile
from holdfast.store.backends.durable_files import (
    Directory,
    make_root,
    new_owner,
    read_at,
    reading,
    sync_directory,
    write_at,
    writing,
)
from holdfast.store.backends.interfaces import Closes, Put
from holdfast.store.format import manifest as form

THREADS_MAX = 4
_DOOMED_PREFIX = ".removing-"


def threads_of_rank() -> int:
    """Return the number of threads with which a rank reads or writes extents: cores / ranks of this host, 1 to 4."""
    local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return max(1, min(THREADS_MAX, len(os.sched_getaffinity(0)) // max(1, local)))


class LocalFile(Closes):
    """A regular file, opened for reading (a :class:`SourceFile`)."""

    def __init__(self, path: Path, fd: int, size_bytes: int) -> None:
        self.path = path
        self.size_bytes = size_bytes
        self._fd = fd

    def read_at(self, offset: int, buffers: list[memoryview]) -> None:
        """Fill the buffers, one after the other, with the bytes of the file from ``offset`` on."""
        read_at(self._fd, offset, buffers, self.path)

    def read_cached(self, offset: int, buffer: memoryview) -> bool:
        """Fill the buffer from the page cache. Return False if the cache lacks some of the bytes."""
        try:
            return os.preadv(self._fd, [buffer], offset, os.RWF_NOWAIT) == len(buffer)
        except OSError:
            # The bytes are not cached, or the file system does not know. The next read reports a failure of the disk.
            return False

    def close(self) -> None:
        """Close the file. A second call is harmless."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class LocalAttempt(Directory):
    """A directory with the files of one attempt (an :class:`Attempt`)."""

    in_order = False
    parallel = 1

    def hold(self) -> bool:
        """Lock the attempt against removal. Return False if another process is removing it.

        A process that opened the directory before a removal can get the lock after the removal. So the method also
        checks that the path is still this directory.
        """
        if not self.lock(shared=True):
            return False
        with reading(self.path):
            try:
                return os.path.samestat(os.stat(self.path, follow_symlinks=False), os.fstat(self.fd))
            except FileNotFoundError:
                return False

    def open_file(self, name: str) -> LocalFile:
        """Open a file of the attempt for reading."""
        return LocalFile(self.path / name, *self.open_read(name))

    def create(self, name: str, data: bytes, owner: str, *, later: bool = False) -> bool:
        """Write a file unless one of this name exists. Return False if it exists.

        Two concurrent calls may both return True. Either both write the same content, or the validation of the attempt
        finds the difference.
        """
        if self.exists(name):
            return False
        self.write(name, data, owner, later=later)
        return True

    @contextlib.contextmanager
    def new_file(self, name: str, owner: str, *, size_bytes: int, direct: bool = False) -> Iterator[Put]:
        """Yield a function that writes a new file piece by piece. The file appears when :meth:`publish` is called."""
        path = self.path / name
        with self.temporary(name, owner, later=True) as fd:
            if direct:
                file = DirectFile(fd, path)
                yield file.put
                file.finish()
            else:
                yield lambda offset, data: write_at(fd, offset, data, path)


class LocalStore:
    """A directory whose subdirectories are attempts (a :class:`Store`). Nothing is cached between calls."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def names(self) -> list[str]:
        """Return the names of all entries of the directory; empty if the directory does not exist."""
        with reading(self.path):
            try:
                return os.listdir(self.path)
            except FileNotFoundError:
                return []

    def open(self, name: str) -> LocalAttempt:
        """Open an existing attempt."""
        return LocalAttempt.open(self.path / name)

    def create(self, name: str) -> LocalAttempt:
        """Open an attempt, and make it and the root directory if they are missing."""
        return LocalAttempt.make(self.path, name)

    def age_s(self, name: str) -> float:
        """Return the seconds since the directory of an attempt last changed; infinity if it does not exist."""
        with reading(self.path / name):
            try:
                return time.time() - os.stat(self.path / name).st_mtime
            except FileNotFoundError:
                return float("inf")

    def remove(self, name: str) -> bool:
        """Remove an attempt. Return False if it does not exist, or if another process reads or writes it."""
        try:
            directory = self.open(name)
        except CheckpointInvalid:  # another process was faster, or it is no directory and must stay
            return False
        with directory, writing(self.path / name):
            if not directory.lock(shared=False):
                return False
            # The remains of an interrupted removal of an attempt of this name would block the rename.
            shutil.rmtree(self.path / f"{_DOOMED_PREFIX}{name}", ignore_errors=True)
            try:
                os.rename(self.path / name, self.path / f"{_DOOMED_PREFIX}{name}")
            except FileNotFoundError:  # another process was faster
                return False
            sync_directory(self.path)
        # Another process may remove the same files at the same time. The next pruning removes the remaining ones.
        shutil.rmtree(self.path / f"{_DOOMED_PREFIX}{name}", ignore_errors=True)
        return True

    def sweep(self) -> None:
        """Finish removals of attempts that a crash interrupted after :meth:`remove` had renamed the directory."""
        with writing(self.path):
            for name in os.listdir(self.path):
                if name.startswith(_DOOMED_PREFIX) and form.attempt_key(name.removeprefix(_DOOMED_PREFIX)):
                    shutil.rmtree(self.path / name, ignore_errors=True)

    def probe(self) -> None:
        """Test whether files can be written to the root directory, with a temporary file."""
        # Ranks of several hosts may probe a shared directory at once, so each uses a separate name.
        probe = self.path / new_owner(".probe")
        with writing(self.path):
            make_root(self.path)
            os.close(os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
            os.unlink(probe)
