"""Attempts in the memory of this process, with injected faults: for tests, also those of other projects.

``FaultyStore("name", ...)`` is found under ``faulty://name`` while it is referenced. Faults come at counted writes
(each piece written to a file, each file that appears, each sync is one), so that a test can try every one of them.
After a power loss, a seed decides which unsynced files are kept.
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
    """Return the store under this URL.

    Raises:
        UsageError: there is none in this process.
    """
    store = _STORES.get(place.parts[0])
    if store is None or len(place.parts) != 1:
        raise UsageError(
            f"{place}: no FaultyStore of this name in this process", hint="make it first, and keep it"
        )
    return store


class FaultyFile(Closes):
    """A :class:`SourceFile` in memory."""

    def __init__(self, path: Url, data: bytes) -> None:
        self.path = path
        self.size_bytes = len(data)
        self._data = data

    def read_at(self, offset: int, buffers: list[memoryview]) -> None:
        """Implement :meth:`SourceFile.read_at`."""
        for buffer in buffers:
            piece = self._data[offset : offset + len(buffer)]
            if len(piece) < len(buffer):
                raise CheckpointInvalid(f"{self.path}: ends at byte {self.size_bytes}")
            buffer[:] = piece
            offset += len(buffer)

    def close(self) -> None:
        """Do nothing: no file is open."""


class FaultyAttempt(Closes):
    """An :class:`Attempt` in memory."""

    in_order = False
    parallel = 1

    def __init__(self, store: FaultyStore, name: str) -> None:
        self.path = store.path / name
        self._store = store
        self._name = name
        self._held = False

    def close(self) -> None:
        """Implement :meth:`Attempt.close`."""
        if self._held:
            self._store.held[self._name] -= 1
            self._held = False

    def hold(self) -> bool:
        """Implement :meth:`Attempt.hold`."""
        if not self._held:
            self._store.held[self._name] = self._store.held.get(self._name, 0) + 1
            self._held = True
        return self._name in self._store.files

    def names(self) -> list[str]:
        """Implement :meth:`Attempt.names`."""
        return sorted(self._files())

    def exists(self, name: str) -> bool:
        """Implement :meth:`Attempt.exists`."""
        return checked_name(name) in self._files()

    def open_file(self, name: str) -> FaultyFile:
        """Implement :meth:`Attempt.open_file`."""
        data = self._files().get(checked_name(name))
        if data is None:
            raise CheckpointInvalid(f"{self.path / name}: does not exist")
        return FaultyFile(self.path / name, data)

    def read(self, name: str, size_bytes_max: int) -> bytes:
        """Implement :meth:`Attempt.read`."""
        return read_whole(self.open_file(name), size_bytes_max)

    def write(self, name: str, data: bytes, owner: str, *, later: bool = False) -> None:
        """Implement :meth:`Attempt.write`. ``later``: without the sync."""
        with self.new_file(name, owner, size_bytes=len(data)) as put:
            put(0, memoryview(data))
        if not later:
            self.sync()

    def create(self, name: str, data: bytes, owner: str, *, later: bool = False) -> bool:
        """Implement :meth:`Attempt.create`."""
        if self.exists(name):
            return False
        self.write(name, data, owner, later=later)
        return True

    @contextlib.contextmanager
    def new_file(self, name: str, owner: str, *, size_bytes: int, direct: bool = False) -> Iterator[Put]:
        """Implement :meth:`Attempt.new_file`."""
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
        """Implement :meth:`Attempt.sync`."""
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
        fails: error number by write, counted from 1: ``{7: errno.EIO}``.
        room_size_bytes: capacity of the store. Writes beyond it fail (ENOSPC).
        read_only: True makes all writes fail (EACCES).
        delay_s: duration of each write.
        seed: seed of the choice of files that :meth:`lose_power` keeps.
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
        """Simulate a power loss: each unsynced file may be kept or lost."""
        for name, files in self.files.items():
            kept = self.durable.get(name, {})
            lost = {n: d for n, d in files.items() if kept.get(n) != d and self._random.random() < 0.5}
            self.files[name] = {n: d for n, d in files.items() if n not in lost}
            self.files[name].update({n: kept[n] for n in lost if n in kept})
            self.durable[name] = dict(self.files[name])

    def spend(self, path: Url, size_bytes: int = 0) -> None:
        """Count one write of ``size_bytes`` bytes.

        Raises:
            StoreWriteError: this write is to fail.
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
        """Implement :meth:`Store.names`."""
        return list(self.files)

    def open(self, name: str) -> FaultyAttempt:
        """Implement :meth:`Store.open`."""
        if name not in self.files:
            raise CheckpointInvalid(f"{self.path / name}: does not exist")
        return FaultyAttempt(self, name)

    def create(self, name: str) -> FaultyAttempt:
        """Implement :meth:`Store.create`."""
        self.spend(self.path / name)
        self.files.setdefault(name, {})
        self.durable.setdefault(name, {})
        return FaultyAttempt(self, name)

    def age_s(self, name: str) -> float:
        """Implement :meth:`Store.age_s`: all attempts are old."""
        return float("inf")

    def remove(self, name: str) -> bool:
        """Implement :meth:`Store.remove`."""
        if name not in self.files or self.held.get(name, 0):
            return False
        self.spend(self.path / name)
        del self.files[name], self.durable[name]
        return True

    def sweep(self) -> None:
        """Do nothing: no removal has two steps."""

    def probe(self) -> None:
        """Implement :meth:`Store.probe`."""
        self.spend(self.path)
