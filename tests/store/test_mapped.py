"""Bytes that the page cache has are copied from there; anything else is left to the read call, which has errors."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from holdfast.errors import CheckpointInvalid
from holdfast.store.files import Directory
from holdfast.store.local import LocalAttempt
from holdfast.store.mapped import SIZE_BYTES_MIN, Mapped
from tests.store.worlds import random_array

SIZE_BYTES = 4 * SIZE_BYTES_MIN + 100


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "shard-r00000-000.safetensors"
    file.write_bytes(random_array((SIZE_BYTES,), "uint8", 1).tobytes())
    return file


def test_cached_bytes_are_given_without_a_copy_and_copied(path: Path) -> None:
    data = path.read_bytes()
    with LocalAttempt.open(path.parent) as attempt, attempt.open_file(path.name) as file:
        view = file.view(37, SIZE_BYTES_MIN + 5)
        assert view is not None and view.readonly and bytes(view) == data[37 : 37 + SIZE_BYTES_MIN + 5]
        first, second = bytearray(SIZE_BYTES_MIN), bytearray(100)
        file.read_at(SIZE_BYTES - len(first) - 100, [memoryview(first), memoryview(second)])
        assert bytes(first + second) == data[-len(first) - 100 :]
        assert file.view(SIZE_BYTES - SIZE_BYTES_MIN + 1, SIZE_BYTES_MIN) is None, "beyond the end"
        assert file.view(0, 100) is None, "not worth it"


def test_what_is_not_in_the_page_cache_is_read(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    assert Mapped(fd, SIZE_BYTES).view(0, SIZE_BYTES_MIN) is None
    os.close(fd)
    with LocalAttempt.open(path.parent) as attempt, attempt.open_file(path.name) as file:
        buffer = bytearray(SIZE_BYTES)
        file.read_at(0, [memoryview(buffer)])
    assert bytes(buffer) == path.read_bytes()


def test_a_file_cut_off_behind_the_mapping_is_a_typed_error_and_no_signal(path: Path) -> None:
    with LocalAttempt.open(path.parent) as attempt, attempt.open_file(path.name) as file:
        assert file.view(0, SIZE_BYTES_MIN) is not None
        os.truncate(path, SIZE_BYTES // 2)
        buffer = bytearray(SIZE_BYTES)
        with pytest.raises(CheckpointInvalid, match="ends at byte"):
            file.read_at(0, [memoryview(buffer)])
        # A file of its old size, but a hole of the mapping where the disk has nothing: the kernel refuses, too.
        mapped = Mapped(os.open(path, os.O_RDONLY), SIZE_BYTES)
        assert mapped.view(SIZE_BYTES // 2 - SIZE_BYTES_MIN // 2, SIZE_BYTES_MIN) is None


def test_several_threads_share_one_mapping(path: Path) -> None:
    from concurrent.futures import ThreadPoolExecutor

    data = path.read_bytes()
    with Directory.open(path.parent) as directory:
        fd, size_bytes = directory.open_read(path.name)
        mapped = Mapped(fd, size_bytes)
        with ThreadPoolExecutor(8) as pool:
            views = list(pool.map(lambda n: mapped.view(n * 100, SIZE_BYTES_MIN), range(200)))
        os.close(fd)
    assert all(
        view is not None and view == data[n * 100 : n * 100 + SIZE_BYTES_MIN] for n, view in enumerate(views)
    )
