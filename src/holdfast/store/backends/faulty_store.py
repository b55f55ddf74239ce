"""A store of checkpoints in the memory of this process, with injected faults, for tests (also of other projects).

The URL ``faulty://name`` finds the object ``FaultyStore("name", ...)`` as long as a test keeps a reference to it. Each
piece written to a file, each file that appears and each sync is counted as one write. A test sets the numbers of the
writes that fail, and so can try a fault at each write. In a simulated power loss, a seeded random generator chooses
the unsynced files that are kept.
"""

from __future__ import annotations

import contextlib
import errno
import os
import random
import threading
import time
from collections.abc import Iterator, Mapping
from weakref import WeakValueDictionary

from holdfast.errors import CheckpointInvalid, UsageError
from holdfast.store.backends.durable_files import checked_name, writing
from holdfast.store.backends.interfaces import Closes, Put, read_whole
from holdfast.store.backends.location import Url

_STORES: WeakValueDictionary[str, FaultyStore] = WeakValueDictionary()


def faulty_store(place: Url) -> FaultyStore:
    """Return the :class:`FaultyStore` of this process that a ``faulty://`` URL names.

    Raises:
        UsageError: this process has no store of this name.
    """
    store = _STORES.get(place.parts[0])
    if store is None or len(place.parts) != 1:
        raise UsageError(
            f"{place}: no FaultyStore of this name in this process", hint="make it first, and keep it"
        )
    return store


class FaultyFile(Closes):
    """A file of a :class:`FaultyStore`, opened for reading."""

    def __init__(self, path: Url, data: bytes) -> None:
        self.path = path
        self.size_bytes = len(data)
        self._data = data

    def read_at(self, offset: int, buffers: list[memoryview]) -> None:
        """Fill the buffers, one after the other, with the bytes of the file from ``offset`` on."""
        for buffer in buffers:
            piece = self._data[offset : offset + len(buffer)]
            if len(piece) < len(buffer):
                raise CheckpointInvalid(f"{self.path}: ends at byte {self.size_bytes}")
            buffer[:] = piece
            offset += len(buffer)

    def close(self) -> None:
        """Do nothing: no file is open."""


class FaultyAttempt(Closes):
    """The files of one attempt (a save of one step) in a :class:`FaultyStore`."""

    in_order = False
    parallel = 1

    def __init__(self, store: FaultyStore, name: str) -> None:
        self.path = store.path / name
        self._store = store
        self._name = name
        self._held = False

    def close(self) -> None:
        """End the protection from removal that :meth:`hold` began."""
        if self._held:
            self._store.held[self._name] -= 1
            self._held = False

    def hold(self) -> bool:
        """Protect the attempt from removal until :meth:`close`. Return False if the attempt is already removed."""
        if not self._held:
            self._store.held[self._name] = self._store.held.get(self._name, 0) + 1
            self._held = True
        return self._name in self._store.files

    def names(self) -> list[str]:
        """Return the names of all files of the attempt, sorted."""
        return sorted(self._files())

    def exists(self, name: str) -> bool:
        """Return True if the attempt has a file of this name."""
        return checked_name(name) in self._files()

    def open_file(self, name: str) -> FaultyFile:
        """Open a file of the attempt for reading."""
        data = self._files().get(checked_name(name))
        if data is None:
            raise CheckpointInvalid(f"{self.path / name}: does not exist")
        return FaultyFile(self.path / name, data)

    def read(self, name: str, size_bytes_max: int) -> bytes:
        """Return the content of a file of at most ``size_bytes_max`` bytes."""
        return read_whole(self.open_file(name), size_bytes_max)

    def write(self, name: str, data: bytes, owner: str, *, later: bool = False) -> None:
        """Write a file, and then sync the attempt unless ``later`` is True. An existing file is replaced."""
        with self.new_file(name, owner, size_bytes=len(data)) as put:
            put(0, memoryview(data))
        if not later:
            self.sync()

    def create(self, name: str, data: bytes, owner: str, *, later: bool = False) -> bool:
        """Write a file unless one of this name exists. Return False if it exists."""
        if self.exists(name):
            return False
        self.write(name, data, owner, later=later)
        return True

    @contextlib.contextmanager
    def new_file(self, name: str, owner: str, *, size_bytes: int, direct: bool = False) -> Iterator[Put]:
        """Yield a function that writes bytes at an offset of a new file. The file appears after the ``with`` block."""
        content = bytearray(size_bytes)
        path = self.path / checked_name(name)

        def put(offset: int, data: memoryview) -> None:
            self._store.spend(path, len(data))
            content[offset : offset + len(data)] = data

        yield put
        self._store.spend(path)
        self._files()[name] = bytes(content)

    def publish(self) -> None:
        """Do nothing: new files appear at once."""

    def sync(self) -> None:
        """Make all files of the attempt survive :meth:`FaultyStore.lose_power`."""
        self._store.spend(self.path)
        self._store.durable[self._name] = dict(self._files())

    def _files(self) -> dict[str, bytes]:
        found = self._store.files.get(self._name)
        if found is None:
            raise CheckpointInvalid(f"{self.path}: does not exist")
        return found


class FaultyStore:
    """A :class:`Store` in memory, with injected faults.

    Args:
        name: name of the store, found under ``faulty://<name>``. Of several stores with one name, the newest is found.
        fails: error number of each write that fails, by the number of the write (from 1): ``{7: errno.EIO}``.
        room_size_bytes: capacity of the store in bytes; None sets no limit. Writes beyond it fail (ENOSPC).
        read_only: True makes all writes fail (EACCES).
        delay_s: duration of each write in seconds.
        seed: seed of the random choice of the files that :meth:`lose_power` keeps.
    """

    def __init__(
        self,
        name: str,
        *,
        fails: Mapping[int, int] | None = None,
        room_size_bytes: int | None = None,
        read_only: bool = False,
        delay_s: float = 0.0,
        seed: int = 0,
    ) -> None:
        self.path = Url("faulty", (name,))
        self.files: dict[str, dict[str, bytes]] = {}
        self.durable: dict[str, dict[str, bytes]] = {}
        self.held: dict[str, int] = {}
        self.writes = 0
        self.fails = dict(fails or {})
        self.read_only = read_only
        self._room_size_bytes = room_size_bytes
        self._delay_s = delay_s
        self._random = random.Random(seed)
        self._lock = threading.Lock()
        _STORES[name] = self

    def lose_power(self) -> None:
        """Simulate a power loss: at random, each unsynced file keeps its content or gets its last synced content."""
        for name, files in self.files.items():
            kept = self.durable.get(name, {})
            lost = {n: d for n, d in files.items() if kept.get(n) != d and self._random.random() < 0.5}
            self.files[name] = {n: d for n, d in files.items() if n not in lost}
            self.files[name].update({n: kept[n] for n in lost if n in kept})
            self.durable[name] = dict(self.files[name])

    def spend(self, path: Url, size_bytes: int = 0) -> None:
        """Count one write of ``size_bytes`` bytes, and raise an error if this write must fail.

        Raises:
            StoreWriteError: the write is set to fail, or the store is full or read-only; the error names ``path``.
        """
        with self._lock:
            self.writes += 1
            number = self.fails.get(self.writes, 0)
            if self._room_size_bytes is not None:
                self._room_size_bytes -= size_bytes
                if self._room_size_bytes < 0:
                    number = errno.ENOSPC
        if self._delay_s:
            time.sleep(self._delay_s)
        if self.read_only:
            number = errno.EACCES
        if number:
            with writing(path):
                raise OSError(number, os.strerror(number))

    def names(self) -> list[str]:
        """Return the names of all attempts of the store."""
        return list(self.files)

    def open(self, name: str) -> FaultyAttempt:
        """Open an existing attempt."""
        if name not in self.files:
            raise CheckpointInvalid(f"{self.path / name}: does not exist")
        return FaultyAttempt(self, name)

    def create(self, name: str) -> FaultyAttempt:
        """Open an attempt, and make it if it is missing. Each call counts as one write."""
        self.spend(self.path / name)
        self.files.setdefault(name, {})
        self.durable.setdefault(name, {})
        return FaultyAttempt(self, name)

    def age_s(self, name: str) -> float:
        """Return infinity as the age of every attempt, so that a test can prune new attempts."""
        return float("inf")

    def remove(self, name: str) -> bool:
        """Remove an attempt. Return False if it is missing or in use."""
        if name not in self.files or self.held.get(name, 0):
            return False
        self.spend(self.path / name)
        del self.files[name], self.durable[name]
        return True

    def sweep(self) -> None:
        """Do nothing: a removal in memory cannot be interrupted."""

    def probe(self) -> None:
        """Test whether the store can be written: the test counts as one write, and may fail like any other write."""
        self.spend(self.path)
