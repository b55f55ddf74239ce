"""The store of checkpoints in a bucket of an S3-compatible server: ``s3://bucket/prefix``.

Theory. An attempt consists of the objects below ``<root>/<name of the attempt>/``, named like the files of a directory.
Objects appear whole, so nothing is renamed. An object that must not be replaced (catalogue, manifest, seal) is created
only if it does not exist. S3 has no locks. A process that reads or writes an attempt writes its *lease*, an
object, every ``LEASE_RENEW_S`` seconds. A process that removes an attempt first writes a *mark*, which is another
object, and then looks for leases. A process that has written its lease then looks for the mark.
Listings and reads show all earlier writes, so at least one of the two processes sees the object of the other process.

Invariants:
1. A marked attempt is no longer listed. It is removed only when every lease is older than ``LEASE_EXPIRY_S`` seconds.
   The clocks of this machine and of the server may differ by 15 minutes (signatures allow no more).
2. A removal deletes the seal, the manifests and the catalogue first, so that a half-removed attempt is never valid.
3. Safety does not depend on leases. A reader whose lease was lost finds missing objects or wrong digests, and never
   accepts wrong data.
"""

from __future__ import annotations

import contextlib
import secrets
import threading
from contextlib import AbstractContextManager
from datetime import UTC, datetime

from holdfast.errors import CheckpointInvalid, StoreError, StoreWriteError
from holdfast.store.backends.durable_files import checked_name, new_owner
from holdfast.store.backends.interfaces import Closes, Put, read_whole
from holdfast.store.backends.location import Url
from holdfast.store.backends.s3_client import Bucket, S3Object
from holdfast.store.format import manifest as form

LEASE_RENEW_S = 600.0
LEASE_EXPIRY_S = 3600.0
_LEASES = ".leases"
_DOOMED = ".removing"


class S3File(Closes):
    """An object, opened for reading (a :class:`SourceFile`). Every read is one request."""

    def __init__(self, bucket: Bucket, key: str, size_bytes: int) -> None:
        self.path = bucket.place / key
        self.size_bytes = size_bytes
        self._bucket = bucket
        self._key = key

    def read_at(self, offset: int, buffers: list[memoryview]) -> None:
        """Fill the buffers, one after the other, with the bytes of the object from ``offset`` on.

        Raises:
            CheckpointInvalid: the object is missing or ends too early.
            StoreUnreachable: the server could not be reached.
        """
        total = sum(len(buffer) for buffer in buffers)
        if offset + total > self.size_bytes:
            raise CheckpointInvalid(f"{self.path}: ends at byte {self.size_bytes}")
        if not total:
            return
        data = self._bucket.get(self._key, offset, total)
        if len(data) != total:
            raise CheckpointInvalid(f"{self.path}: {len(data)} bytes came in place of {total}")
        done = 0
        for buffer in buffers:
            buffer[:] = data[done : done + len(buffer)]
            done += len(buffer)

    def close(self) -> None:
        """Do nothing: an :class:`S3File` keeps no connection open."""


class Lease:
    """A lease on an attempt: an object that shows other processes that this process reads or writes the attempt.

    A thread renews the lease until :meth:`close`. If the process dies, the lease expires. A client that may only read
    cannot write a lease. So the attempt may be removed while that client reads.
    """

    def __init__(self, bucket: Bucket, attempt: str) -> None:
        self._bucket = bucket
        self._key = f"{_LEASES}/{attempt}/{secrets.token_hex(8)}"
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Write the lease object, and start the thread that renews it.

        Raises:
            StoreWriteError: the lease cannot be written.
        """
        if not self._bucket.announce(self._key):
            return
        thread = threading.Thread(target=self._renew, name="holdfast-lease", daemon=True)
        try:
            thread.start()
        except BaseException:
            self._take_back()
            raise
        self._thread = thread

    def close(self) -> None:
        """Stop the thread, and remove the lease object."""
        if self._thread is not None:
            self._over.set()
            self._thread.join()
            self._take_back()

    def _take_back(self) -> None:
        with contextlib.suppress(StoreWriteError):  # the lease expires
            self._bucket.delete([self._key])

    def _renew(self) -> None:
        while not self._over.wait(LEASE_RENEW_S):
            with contextlib.suppress(StoreWriteError):  # five more tries follow before the lease expires
                self._bucket.put(self._key, b"")


class S3Attempt(Closes):
    """The objects of one attempt in a bucket (an :class:`Attempt`)."""

    in_order = True
    parallel = 16

    def __init__(self, bucket: Bucket, name: str) -> None:
        self.path = bucket.place / name
        self._bucket = bucket
        self._name = name
        self._sizes: dict[str, int] = {}
        self._lease: Lease | None = None

    def close(self) -> None:
        """Remove the lease that :meth:`hold` wrote, if any."""
        if self._lease is not None:
            self._lease.close()
            self._lease = None

    def hold(self) -> bool:
        """Protect the attempt from removal by a lease. Return False if another process is removing the attempt."""
        if self._lease is None:
            lease = Lease(self._bucket, self._name)
            lease.start()
            self._lease = lease
        return not self._bucket.exists(f"{_DOOMED}/{self._name}")

    def names(self) -> list[str]:
        """Return the names of all files of the attempt, sorted, and remember their sizes for :meth:`open_file`."""
        entries = [
            e for e in self._bucket.entries(self._name) if "/" not in e.key and not e.key.startswith(".")
        ]
        self._sizes = {entry.key: entry.size_bytes for entry in entries}
        return sorted(self._sizes)

    def exists(self, name: str) -> bool:
        """Return True if the attempt has a file of this name."""
        return self._bucket.exists(self._key(name))

    def open_file(self, name: str) -> S3File:
        """Open a file of the attempt for reading."""
        key = self._key(name)
        size_bytes = self._sizes.get(name)
        if size_bytes is None:
            size_bytes = self._bucket.size_bytes(key)
        if size_bytes is None:
            raise CheckpointInvalid(f"{self.path / name}: does not exist")
        return S3File(self._bucket, key, size_bytes)

    def read(self, name: str, size_bytes_max: int) -> bytes:
        """Return the content of a file of at most ``size_bytes_max`` bytes."""
        return read_whole(self.open_file(name), size_bytes_max)

    def write(self, name: str, data: bytes, owner: str) -> None:
        """Write a file. An existing file of this name is replaced."""
        self._bucket.put(self._key(name), data)

    def create(self, name: str, data: bytes, owner: str, *, later: bool = False) -> bool:
        """Write a file unless one of this name exists. Return False if it exists."""
        return self._bucket.create(self._key(name), data)

    def new_file(
        self, name: str, owner: str, *, size_bytes: int, direct: bool = False
    ) -> AbstractContextManager[Put]:
        """Yield a function that writes a new file piece by piece, as an upload in parts."""
        return self._bucket.upload(self._key(name), size_bytes)

    def publish(self) -> None:
        """Do nothing: new objects appear at once."""

    def sync(self) -> None:
        """Do nothing: an object is durable when its write was acknowledged."""

    def _key(self, name: str) -> str:
        return f"{self._name}/{checked_name(name)}"


class S3Store:
    """A bucket, or a prefix in one, that holds attempts (a :class:`Store`). Nothing is cached between calls."""

    def __init__(self, path: Url) -> None:
        self.path = path
        self._bucket = Bucket(path)

    def names(self) -> list[str]:
        """Return the names of all entries of the store, without attempts that are being removed."""
        doomed = {entry.key for entry in self._bucket.entries(_DOOMED)}
        return [name for name in self._bucket.folders() if name not in doomed]

    def open(self, name: str) -> S3Attempt:
        """Return an attempt by name. A missing attempt is noticed only when its files are read."""
        return S3Attempt(self._bucket, name)

    def create(self, name: str) -> S3Attempt:
        """Return an attempt by name. A new attempt exists as soon as its first file exists."""
        return S3Attempt(self._bucket, name)

    def age_s(self, name: str) -> float:
        """Return the seconds since the newest object of an attempt was written; infinity if there is no object."""
        return min((_age_s(entry) for entry in self._bucket.entries(name)), default=float("inf"))

    def remove(self, name: str) -> bool:
        """Remove an attempt. Return False if a process holds a lease on it."""
        if self._leased(name):
            return False
        mark = f"{_DOOMED}/{name}"
        self._bucket.put(mark, b"")
        if self._leased(name):
            self._bucket.delete([mark])
            return False
        keys = [f"{name}/{entry.key}" for entry in self._bucket.entries(name)]
        proofs = [key for key in keys if not key.endswith(".safetensors")]
        self._bucket.delete(sorted(proofs, key=lambda key: not key.endswith(form.SEAL_NAME)))
        self._bucket.delete([key for key in keys if key.endswith(".safetensors")])
        self._bucket.delete([mark])
        return True

    def sweep(self) -> None:
        """Finish interrupted removals of attempts, and delete expired leases."""
        for entry in self._bucket.entries(_DOOMED):
            if form.attempt_key(entry.key):
                self.remove(entry.key)
        expired = [e.key for e in self._bucket.entries(_LEASES) if _age_s(e) > LEASE_EXPIRY_S]
        self._bucket.delete([f"{_LEASES}/{key}" for key in expired])

    def probe(self) -> None:
        """Test that objects can be written, and that the server refuses to create an object that exists."""
        key = new_owner(".probe")
        if not self._bucket.create(key, b""):
            raise StoreError(f"{self.path / key} exists: no other process should know this name")
        again = self._bucket.create(key, b"")
        self._bucket.delete([key])
        if again:
            raise StoreWriteError(
                f"the server of {self.path} ignores If-None-Match: two writers could overwrite each other",
                hint="use a server with conditional writes (AWS, a MinIO or Ceph of 2025 or newer)",
            )

    def _leased(self, name: str) -> bool:
        return any(_age_s(entry) <= LEASE_EXPIRY_S for entry in self._bucket.entries(f"{_LEASES}/{name}"))


def _age_s(entry: S3Object) -> float:
    return (datetime.now(UTC) - entry.modified).total_seconds()
