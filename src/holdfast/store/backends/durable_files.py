"""Directories of a checkpoint: durable writes, and reads that never leave the directory.

Theory. A file becomes visible whole or not at all: write a temporary file, fsync it, rename it, fsync the directory.
Files that are published together share these waits for the disk: all contents first, then all renames in order, then
the directory. All access uses the descriptor of the opened directory and names without a slash, and no symbolic link is
followed below it, so a hostile manifest or a swapped link cannot lead elsewhere.

Invariants:
1. A name that does not start with a dot exists only with its complete, durable content.
2. Files are 0600 and directories 0700, also the root if it is made here. Files for other programs follow the umask.
3. ``OSError`` never leaves this module's public functions. A write raises :class:`StoreWriteError`. A read raises
   :class:`CheckpointInvalid`, or :class:`StoreUnreachable` if the error says nothing about the file. All name the path.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, Self

from holdfast.errors import (
    HINTS_OF_THE_MACHINE,
    CheckpointInvalid,
    StoreDenied,
    StoreError,
    StoreUnreachable,
    StoreWriteError,
)
from holdfast.store.backends.interfaces import Closes
from holdfast.store.backends.location import Place

NAME_SIZE_BYTES_MAX = 255
PRIVATE = 0o600
SHARED = 0o666
TEMPORARY_PREFIX = ".tmp-"
IOVECS_MAX = 512
_HINTS = {
    errno.ENOSPC: "free some space, or choose another checkpoint directory",
    errno.EDQUOT: "free some space, or choose another checkpoint directory",
    errno.EFBIG: "raise the file size limit (ulimit -f), or choose another checkpoint directory",
    errno.EROFS: "choose a writable checkpoint directory",
    errno.EACCES: "make the directory writable, or choose another one",
    errno.EPERM: "make the directory writable, or choose another one",
    errno.ENOTDIR: "choose a directory, not a file",
    errno.EISDIR: "a directory has the name of this file: move it away",
    errno.EEXIST: "something of this name is there already: choose another name",
    errno.ENOTEMPTY: "something of this name is there already: choose another name",
}
_DENIED = frozenset({errno.EACCES, errno.EPERM})
_AWAY = frozenset({
    errno.EAGAIN, errno.EMFILE, errno.ENFILE, errno.ENOMEM,
    errno.ECONNABORTED, errno.ECONNREFUSED, errno.ECONNRESET, errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ENETDOWN,
    errno.ENETUNREACH, errno.ENOTCONN, errno.ESHUTDOWN, errno.ESTALE, errno.ETIMEDOUT,
    errno.EKEYEXPIRED, errno.ENOKEY,
})  # fmt: skip
"""Error numbers that mean that this machine, or the one whose file system is mounted, cannot read now.

EIO is not among them, because a bad block gives it.
"""
_NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS)
"""Error numbers of file systems without hard links (FAT, many that are mounted from an object store)."""


@contextlib.contextmanager
def writing(path: Place | str) -> Iterator[None]:
    """Turn ``OSError`` into :class:`StoreWriteError` about ``path``."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        raise StoreWriteError(
            f"cannot write {path}: {reason}", hint=_HINTS.get(error.errno or 0, "")
        ) from error


@contextlib.contextmanager
def reading(path: Place | str) -> Iterator[None]:
    """Turn ``OSError`` into :class:`CheckpointInvalid` about ``path``, or into :class:`StoreUnreachable`.

    The latter is for errors that say nothing about the file.
    """
    try:
        yield
    except FileNotFoundError as error:
        raise CheckpointInvalid(f"{path}: does not exist") from error
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENOTDIR):
            raise CheckpointInvalid(f"{path}: is a symbolic link or not a directory") from error
        what = f"cannot read {path}: {error.strerror or error}"
        if error.errno in _DENIED:
            hint = HINTS_OF_THE_MACHINE[errno.EACCES]
            raise StoreDenied(f"{what} ({_whose(Path(str(path)))})", hint=hint) from error
        if error.errno in _AWAY:
            hint = HINTS_OF_THE_MACHINE.get(error.errno, HINTS_OF_THE_MACHINE[errno.ESTALE])
            raise StoreUnreachable(what, hint=hint) from error
        raise CheckpointInvalid(what) from error


def mode_of(path: Path) -> int | None:
    """Return kind and permissions of a path; None: nothing is there.

    Raises:
        CheckpointInvalid, StoreUnreachable: as :func:`reading`.
    """
    with reading(path):
        try:
            return os.stat(path).st_mode
        except (FileNotFoundError, NotADirectoryError):
            return None


def _whose(path: Path) -> str:
    """Return the user of this process, and the owner of the file or of the directory that hides it, as text."""
    asks = f"this process runs as uid {os.geteuid()}"
    for there in (path.absolute(), *path.absolute().parents):
        with contextlib.suppress(OSError):
            status = os.stat(there)
            what = "it" if there == path.absolute() else str(there)
            return f"{asks}; {what} belongs to uid {status.st_uid}, mode {stat.S_IMODE(status.st_mode):04o}"
    return asks


class _New(NamedTuple):
    """A file that was written and is not published yet."""

    hidden: str
    name: str
    fd: int
    replace: bool


class Directory(Closes):
    """An opened directory (a context manager). Names are plain file names inside it."""

    def __init__(self, path: Path, fd: int) -> None:
        self.path = path
        self.fd = fd
        self._new: list[_New] = []
        self._settled = True  # its own name is durable in its parent, as far as this object knows

    @classmethod
    def open(cls, path: Path | str) -> Self:
        """Open an existing directory. A symbolic link as last component is refused.

        Raises:
            CheckpointInvalid: the path does not exist, or is no directory.
        """
        with reading(path):
            return cls(Path(path), os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC))

    @classmethod
    def make(cls, root: Path | str, name: str) -> Self:
        """Open ``root/name``. Make it and ``root`` if they are missing; :meth:`sync` makes that durable.

        Raises:
            StoreWriteError: a directory cannot be made.
        """
        root, name = Path(root), checked_name(name)
        with writing(root / name):
            make_root(root)
            with contextlib.suppress(FileExistsError):
                os.mkdir(root / name, 0o700)
            flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
            made = cls(root / name, os.open(root / name, flags))
        made._settled = False  # the process that made it may have died before the sync
        return made

    def close(self) -> None:
        """Close the descriptor, and drop files that were not published. A second call is harmless."""
        if self.fd >= 0:
            self._drop(self._new)
            os.close(self.fd)
            self.fd = -1

    def lock(self, *, shared: bool) -> bool:
        """Mark the directory as being read (shared) or about to be removed. Return False when that is impossible now.

        The mark is an advisory lock of this descriptor and ends with it. On a file system without locks, a reader
        always succeeds and a remover never does.
        """
        try:
            fcntl.flock(self.fd, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError:
            return shared
        return True

    def names(self) -> list[str]:
        """Return the names of all entries, sorted, without temporary files.

        Raises:
            CheckpointInvalid: the directory cannot be read.
        """
        with reading(self.path):
            return sorted(name for name in os.listdir(self.fd) if not name.startswith("."))

    def exists(self, name: str) -> bool:
        """Return True when an entry of this name exists (of whatever kind)."""
        with reading(self.path / name):
            try:
                os.stat(checked_name(name), dir_fd=self.fd, follow_symlinks=False)
            except FileNotFoundError:
                return False
            return True

    def open_read(self, name: str) -> tuple[int, int]:
        """Return descriptor (the caller closes it) and size in bytes of a regular file.

        Raises:
            CheckpointInvalid: the file is missing, a symbolic link, or no regular file.
        """
        with reading(self.path / name):
            flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
            fd = os.open(checked_name(name), flags, dir_fd=self.fd)
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            os.close(fd)
            raise CheckpointInvalid(f"{self.path / name}: not a regular file")
        return fd, status.st_size

    def read(self, name: str, size_bytes_max: int) -> bytes:
        """Return the content of a file.

        Raises:
            CheckpointInvalid: as :meth:`open_read`, or larger than ``size_bytes_max``.
        """
        fd, total = self.open_read(name)
        try:
            if total > size_bytes_max:
                raise CheckpointInvalid(f"{self.path / name}: {total} bytes; the limit is {size_bytes_max}")
            buffer = bytearray(total)
            read_at(fd, 0, [memoryview(buffer)], self.path / name)
            return bytes(buffer)
        finally:
            os.close(fd)

    def write(self, name: str, data: bytes, owner: str, *, later: bool = False, mode: int = PRIVATE) -> None:
        """Write a file that appears whole and durable. The directory is also synced.

        Args:
            name: name of the file.
            data: its content.
            owner: makes the name of the temporary file unique.
            later: publish it only in :meth:`publish`, together with others.
            mode: permissions, less the umask.

        Raises:
            StoreWriteError: the file cannot be written; nothing visible has changed.
        """
        with self.temporary(name, owner, later=later, mode=mode) as fd:
            write_at(fd, 0, memoryview(data), self.path / name)
        if not later:
            self.sync()

    @contextlib.contextmanager
    def temporary(
        self, name: str, owner: str, *, later: bool = False, replace: bool = True, mode: int = PRIVATE
    ) -> Iterator[int]:
        """Yield the descriptor of a new temporary file.

        It becomes ``name``, durable, when the block ends without an error.

        Args:
            name: name of the file.
            owner: makes the name of the temporary file unique.
            later: publish it only in :meth:`publish`, together with others.
            replace: replace an existing file of this name; otherwise that is an error.
            mode: permissions, less the umask.

        Raises:
            StoreWriteError: the file cannot be written. The temporary file is then removed.
        """
        hidden = f"{TEMPORARY_PREFIX}{checked_name(owner)}-{checked_name(name)}"
        flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
        with writing(self.path / name):
            new = _New(hidden, name, os.open(hidden, flags, mode, dir_fd=self.fd), replace)
        try:
            yield new.fd
        except BaseException:
            self._drop([new])
            raise
        self._new.append(new)
        if not later:
            self.publish()

    def publish(self) -> None:
        """Make the contents of all new files durable, then rename them in the order in which they were made.

        Raises:
            StoreWriteError: a file cannot be written. The files that have not been renamed are then removed.
        """
        try:
            for new in self._new:
                with writing(self.path / new.name):
                    os.fsync(new.fd)
            while self._new:
                new = self._new[0]
                with writing(self.path / new.name):
                    self._appear(new)
                os.close(self._new.pop(0).fd)
        except BaseException:
            self._drop(self._new)
            raise

    def sync(self) -> None:
        """Publish the new files, and make all names durable.

        Raises:
            StoreWriteError: the file system refused.
        """
        self.publish()
        with writing(self.path):
            os.fsync(self.fd)
            if not self._settled:
                sync_directory(self.path.parent)
                self._settled = True

    def _appear(self, new: _New) -> None:
        if not new.replace and self._link(new):
            return
        os.rename(new.hidden, new.name, src_dir_fd=self.fd, dst_dir_fd=self.fd)

    def _link(self, new: _New) -> bool:
        """Link a file to its name. Return False if links are impossible and the name is free, so that a rename is safe.

        Raises:
            FileExistsError: the name exists.
        """
        try:
            os.link(new.hidden, new.name, src_dir_fd=self.fd, dst_dir_fd=self.fd)
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            if self.exists(new.name):  # without links, a test before the rename is the best possible
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST)) from None
            return False
        with contextlib.suppress(OSError):  # the file has appeared
            os.unlink(new.hidden, dir_fd=self.fd)
        return True

    def _drop(self, files: list[_New]) -> None:
        """Remove files that did not appear."""
        for new in files:
            with contextlib.suppress(OSError):  # an error in progress matters more
                os.unlink(new.hidden, dir_fd=self.fd)
            os.close(new.fd)
        self._new = [new for new in self._new if new not in files]


def make_root(path: Path) -> None:
    """Make a private root (mode 0700) if it is missing. ``OSError`` is not converted.

    Directories above it may serve other purposes, too: they follow the umask, as from ``mkdir -p -m 0700``.
    """
    path.mkdir(mode=0o700, parents=True, exist_ok=True)


def new_owner(what: str) -> str:
    """Return a name that no other process has, for temporary files of a command that may run several times at once."""
    return f"{what}-{secrets.token_hex(8)}"


def sync_directory(path: Path) -> None:
    """Sync a directory by path (fsync). ``OSError`` is not converted."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_at(fd: int, offset: int, data: memoryview, path: Path) -> None:
    """Write all of ``data`` at ``offset``, and make the disk begin with it.

    Raises:
        StoreWriteError: disk full, limit reached, input/output error.
    """
    with writing(path):
        done = 0
        while done < len(data):
            done += os.pwrite(fd, data[done:], offset + done)
        # This call does not drop dirty pages but starts their transfer: the disk then works while the next extent is
        # copied, not only in fsync.
        os.posix_fadvise(fd, offset, done, os.POSIX_FADV_DONTNEED)


def read_at(fd: int, offset: int, buffers: list[memoryview], path: Path) -> None:
    """Fill ``buffers`` one after the other from ``offset`` on.

    Raises:
        CheckpointInvalid: the file ends too early, or an input/output error.
    """
    rest = [buffer for buffer in buffers if len(buffer)]
    with reading(path):
        while rest:
            count = os.preadv(fd, rest[:IOVECS_MAX], offset)
            if count == 0:
                raise CheckpointInvalid(f"{path}: ends at byte {offset}")
            offset += count
            while rest and count >= len(rest[0]):
                count -= len(rest[0])
                rest.pop(0)
            if rest and count:
                rest[0] = rest[0][count:]


def checked_name(name: str) -> str:
    """Return ``name`` if it is a plain name inside a directory and printable.

    Raises:
        StoreError: ``name`` is no such name.
    """
    leads = not name or "/" in name or name in (".", "..")
    # Unprintable characters may control a terminal, or are no text: a surrogate cannot be encoded.
    if leads or not name.isprintable() or len(name.encode()) > NAME_SIZE_BYTES_MAX:
        raise StoreError(
            f"{name!r} is not a file name", hint="write a plain name, without control characters"
        )
    return name
