"""Files written past the page cache hold exactly what was put."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from holdfast.core.ids import SaveId
from holdfast.errors import InternalError
from holdfast.store.direct import BUFFER_SIZE_BYTES, DirectFile
from holdfast.store.plan import plan
from holdfast.store.reader import load_into
from holdfast.store.validity import inspect
from holdfast.store.writer import write_share
from tests.store.worlds import random_array, replicated, save_id


@pytest.fixture(params=["disk", "memory"])
def place(request: pytest.FixtureRequest) -> Iterator[Path]:
    """A directory on a disk (as far as the temporary directory is on one), and one in memory."""
    base = "/dev/shm" if request.param == "memory" else None
    with tempfile.TemporaryDirectory(prefix="holdfast-", dir=base) as name:
        yield Path(name)


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
