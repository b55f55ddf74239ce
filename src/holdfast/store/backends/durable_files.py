"""Directories of a checkpoint: durable writes, and reads that never leave the directory.

Theory. A file becomes visible whole or not at all: write a temporary file, fsync it, rename it, fsync the directory.
Files that are published together wait for the disk only once. First the contents of all files are synced, then the
files are renamed in their order, then the directory is synced. All access uses the descriptor of the opened directory
and names without a slash. No symbolic link is followed below the directory. So a hostile manifest or a swapped link
cannot lead to a file outside of the directory.

Invariants:
1. A file whose name does not start with a dot has its complete, durable content.
2. Files have mode 0600 and directories 0700, including a checkpoint root that this module makes. Files for other
   programs (``SHARED``) follow the umask.
3. Public functions convert ``OSError``, except :func:`make_root` and :func:`sync_directory`. A write raises
   :class:`StoreWriteError`. A read raises :class:`CheckpointInvalid`, or :class:`StoreUnreachable` if the error says
   nothing about the file. All errors name the path.
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
"""Error numbers of a machine (this one or a file server) that cannot read now, whatever the file contains.

EIO is not among them, because a bad block of the disk also gives EIO.
"""
_NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS)
"""Error numbers of file systems without hard links (FAT, many mounted object stores)."""


@contextlib.contextmanager
def writing(path: Place | str) -> Iterator[None]:
    """Convert an ``OSError`` in the ``with`` block into a :class:`StoreWriteError` that names ``path``."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        raise StoreWriteError(
            f"cannot write {path}: {reason}", hint=_HINTS.get(error.errno or 0, "")
        ) from error


@contextlib.contextmanager
def reading(path: Place | str) -> Iterator[None]:
    """Convert an ``OSError`` in the ``with`` block into an error that names ``path``.

    The new error is :class:`StoreDenied` if this process has no right to read, :class:`StoreUnreachable` if this
    machine or a file server cannot read now, and otherwise :class:`CheckpointInvalid`.
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
    """Return the mode of a path (file type and permissions, as in ``st_mode``); None if nothing exists there.

    Raises:
        CheckpointInvalid, StoreUnreachable: the path cannot be examined.
    """
    with reading(path):
        try:
            return os.stat(path).st_mode
        except (FileNotFoundError, NotADirectoryError):
            return None


def _whose(path: Path) -> str:
    """Return text for an error: the user id of this process, and the owner and mode of ``path`` or a parent."""
    asks = f"this process runs as uid {os.geteuid()}"
    for there in (path.absolute(), *path.absolute().parents):
        with contextlib.suppress(OSError):
            status = os.stat(there)
            what = "it" if there == path.absolute() else str(there)
            return f"{asks}; {what} belongs to uid {status.st_uid}, mode {stat.S_IMODE(status.st_mode):04o}"
    return asks


class _New(NamedTuple):
    """A file that was written under the temporary name ``hidden`` and is not published as ``name`` yet."""

    hidden: str
    name: str
    fd: int
    replace: bool


class Directory(Closes):
    """An opened directory (a context manager). Its methods take plain file names inside the directory."""

    def __init__(self, path: Path, fd: int) -> None:
        self.path = path
        self.fd = fd
        self._new: list[_New] = []
        self._settled = True  # False: the name of this directory may not be durable in its parent

    @classmethod
    def open(cls, path: Path | str) -> Self:
        """Open an existing directory. A path whose last component is a symbolic link is refused.

        Raises:
            CheckpointInvalid: the path does not exist, or is not a directory.
        """
        with reading(path):
            return cls(Path(path), os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC))

    @classmethod
    def make(cls, root: Path | str, name: str) -> Self:
        """Open the directory ``root/name``. Missing directories are made, and :meth:`sync` makes ``root/name`` durable.

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
        made._settled = False  # the process that made the directory may have died before its sync
        return made

    def close(self) -> None:
        """Close the descriptor, and remove temporary files that were not published. A second call is harmless."""
        if self.fd >= 0:
            self._drop(self._new)
            os.close(self.fd)
            self.fd = -1

    def lock(self, *, shared: bool) -> bool:
        """Lock the directory, without waiting. Return False if another process holds a conflicting lock.

        ``shared`` is True for a process that reads or writes the directory, and False for one that will remove it. The
        lock is an advisory lock and ends when the descriptor is closed. On a file system without locks, a shared lock
        always succeeds and an exclusive lock never does.
        """
        try:
            fcntl.flock(self.fd, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError:
            return shared
        return True

    def names(self) -> list[str]:
        """Return the names of all entries of the directory, sorted, without temporary files.

        Raises:
            CheckpointInvalid: the directory cannot be read.
        """
        with reading(self.path):
            return sorted(name for name in os.listdir(self.fd) if not name.startswith("."))

    def exists(self, name: str) -> bool:
        """Return True if the directory has an entry of this name: a file, a directory or a link."""
        with reading(self.path / name):
            try:
                os.stat(checked_name(name), dir_fd=self.fd, follow_symlinks=False)
            except FileNotFoundError:
                return False
            return True

    def open_read(self, name: str) -> tuple[int, int]:
        """Open a regular file for reading. Return its descriptor, which the caller closes, and its size in bytes.

        Raises:
            CheckpointInvalid: the file is missing, a symbolic link, or not a regular file.
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
        """Return the content of a file of the directory.

        Raises:
            CheckpointInvalid: the file is missing, not a regular file, or larger than ``size_bytes_max``.
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
        """Write a file, which appears under its name only when it is complete and durable.

        Args:
            name: name of the file.
            data: its content.
            owner: text that makes the name of the temporary file unique.
            later: if True, the file appears at the next :meth:`publish`, together with others. Otherwise it appears
                now, and the directory is synced.
            mode: permissions of the file, reduced by the umask.

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

        When the ``with`` block ends without an error, the file is synced and renamed to ``name``.

        Args:
            name: final name of the file.
            owner: text that makes the name of the temporary file unique.
            later: if True, the file is synced and renamed at the next :meth:`publish`, together with others.
            replace: if True, an existing file of this name is replaced. Otherwise an existing file is an error.
            mode: permissions of the file, reduced by the umask.

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
        """Make the contents of all new files durable, then rename the files in the order in which they were made.

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
        """Publish the new files, and make all file names of the directory durable.

        Raises:
            StoreWriteError: a file or the directory cannot be synced.
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
        """Give a temporary file its final name by a hard link. Return False if the file system has no hard links.

        After False no file has the final name, so the caller may rename the temporary file.

        Raises:
            FileExistsError: a file of this name exists.
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
        """Close new files that have not been renamed, and remove them."""
        for new in files:
            with contextlib.suppress(OSError):  # an error in progress matters more
                os.unlink(new.hidden, dir_fd=self.fd)
            os.close(new.fd)
        self._new = [new for new in self._new if new not in files]


def make_root(path: Path) -> None:
    """Make the root directory of checkpoints with mode 0700, if it is missing. ``OSError`` is not converted.

    Missing parents of the root follow the umask, as with ``mkdir -p -m 0700``, because they may serve other purposes.
    All directories that were made are durable afterwards.
    """
    path = path.absolute()
    missing = [directory for directory in (path, *path.parents) if not directory.exists()]
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    for directory in missing:
        sync_directory(directory.parent)


def new_owner(what: str) -> str:
    """Return ``what`` with a random suffix, as the unique part of the names of a command's temporary files."""
    return f"{what}-{secrets.token_hex(8)}"


def sync_directory(path: Path) -> None:
    """Make the file names in the directory ``path`` durable (fsync). ``OSError`` is not converted."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_at(fd: int, offset: int, data: memoryview, path: Path) -> None:
    """Write all of ``data`` at ``offset`` of an open file, and start its transfer to the disk.

    Raises:
        StoreWriteError: disk full, size limit reached, input/output error.
    """
    with writing(path):
        done = 0
        while done < len(data):
            done += os.pwrite(fd, data[done:], offset + done)
        # For dirty pages this call only starts their transfer to the disk. The disk then works while the next extent is
        # copied, and not only in fsync.
        os.posix_fadvise(fd, offset, done, os.POSIX_FADV_DONTNEED)


def read_at(fd: int, offset: int, buffers: list[memoryview], path: Path) -> None:
    """Fill ``buffers``, one after the other, with the bytes of an open file from ``offset`` on.

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
    """Return ``name`` if it is a printable file name without a slash.

    Raises:
        StoreError: ``name`` is empty, ``.``, ``..``, too long, unprintable, or has a slash.
    """
    leads = not name or "/" in name or name in (".", "..")
    # Unprintable characters may control a terminal. Surrogates are also unprintable, and cannot be encoded.
    if leads or not name.isprintable() or len(name.encode()) > NAME_SIZE_BYTES_MAX:
        raise StoreError(
            f"{name!r} is not a file name", hint="write a plain name, without control characters"
        )
    return name
