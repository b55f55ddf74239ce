"""Files that are written past the page cache contain exactly the bytes that were put in."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import resource
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from holdfast.core.ids import SaveId
from holdfast.errors import InternalError, StoreWriteError
from holdfast.store.backends.direct_io import BUFFER_SIZE_BYTES, DirectFile
from holdfast.store.layouts.save_plan import plan
from holdfast.store.read.load import load_into
from holdfast.store.read.validation import inspect
from holdfast.store.write.writer import write_share
from tests.store.worlds import random_array, replicated, save_id


@pytest.fixture(params=["disk", "memory"])
def place(request: pytest.FixtureRequest) -> Iterator[Path]:
    """Yield a directory on a disk (if the temporary directory is on one), and one in memory."""
    base = "/dev/shm" if request.param == "memory" else None
    with tempfile.TemporaryDirectory(prefix="holdfast-", dir=base) as name:
        yield Path(name)


@pytest.mark.parametrize("shift", [0, 4096, 64, 1])
def test_memory_that_lies_like_the_file_is_written_from_there(place: Path, shift: int) -> None:
    """A header is followed by one long run in blocks, ``shift`` bytes after a page boundary.

    Unaligned parts are copied.
    """
    memory = mmap.mmap(-1, 3 * BUFFER_SIZE_BYTES)
    memory[:] = os.urandom(len(memory))
    run = memoryview(memory)[shift : 2 * BUFFER_SIZE_BYTES + 5000]
    path = place / "file"
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        file = DirectFile(fd, path)
        file.put(0, memoryview(b"h" * 8192))
        for at in range(0, len(run), 1 << 20):
            file.put(8192 + at, run[at : at + (1 << 20)])
        file.finish()
    finally:
        os.close(fd)
    assert path.read_bytes() == b"h" * 8192 + bytes(run)


@pytest.mark.parametrize(
    "sizes",
    [
        [1],
        [4096],
        [4096, 1],
        [4095, 2, 4095],
        [BUFFER_SIZE_BYTES],
        [BUFFER_SIZE_BYTES - 1, 2, 5],
        [3, 2 * BUFFER_SIZE_BYTES, 7],
        [],
    ],
)
def test_any_sizes_arrive_whole(place: Path, sizes: list[int]) -> None:
    data = os.urandom(sum(sizes))
    path = place / "file"
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        file, offset = DirectFile(fd, path), 0
        for size_bytes in sizes:
            file.put(offset, memoryview(data)[offset : offset + size_bytes])
            offset += size_bytes
        with pytest.raises(InternalError, match="does not follow"):
            file.put(offset + 1, memoryview(b"x"))
        file.finish()
    finally:
        os.close(fd)
    assert path.read_bytes() == data


def test_a_share_written_directly_is_the_same_file(place: Path) -> None:
    world = replicated(
        1,
        {
            "odd": random_array((1111, 333), "float32", 1),
            "bytes": random_array((4097,), "uint8", 2),
            "large": random_array((3_000_000,), "float64", 3),
            "empty": np.zeros((0, 3)),
        },
    )
    catalogue = world.catalogue()
    shares = plan(catalogue, frozenset({0}))
    contents = []
    for direct in (False, True):
        identity = SaveId("run", save_id().generation, 1, 0, "periodic")
        root = place / str(direct)
        written = write_share(root, identity, catalogue, shares, 0, world.state(0), {}, {}, direct=direct)
        assert written.sealed
        found = inspect(root / identity.directory(), deep=True)
        assert found.valid and not found.damage
        state = world.state(0, empty=True)
        load_into(found.path, state.targets())
        world.check(state)
        contents.append({f.name: f.read_bytes() for f in Path(found.path).iterdir()})
    assert contents[0] == contents[1]


def test_a_limit_in_the_middle_is_a_typed_error(place: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    fd = os.open(place / "file", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (BUFFER_SIZE_BYTES + 5000, before[1]))
        file = DirectFile(fd, place / "file")
        with pytest.raises(StoreWriteError, match="File too large"):
            file.put(0, memoryview(bytes(3 * BUFFER_SIZE_BYTES)))
    finally:
        os.close(fd)
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)


def test_a_system_that_takes_no_direct_write_after_all_gets_buffered_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The third direct write is refused for its alignment. No byte is lost or written twice."""
    real, calls = os.pwrite, 0

    def refusing(fd: int, data: memoryview, offset: int) -> int:
        nonlocal calls
        calls += 1
        if calls >= 3 and fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(fd, data, offset)

    monkeypatch.setattr(os, "pwrite", refusing)
    data = os.urandom(4 * BUFFER_SIZE_BYTES + 77)
    fd = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        file, step = DirectFile(fd, tmp_path / "file"), 1_000_001
        for offset in range(0, len(data), step):
            file.put(offset, memoryview(data)[offset : offset + step])
        file.finish()
    finally:
        os.close(fd)
    assert (tmp_path / "file").read_bytes() == data and not file.direct
