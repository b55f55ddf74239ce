"""A disk of a host: ext4 on a loop device, which can be filled and frozen."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from holdfast.errors import InternalError

SIZE_BYTES = 256 << 20  # a host with less than 64 MiB of room counts as a host that will leave


@contextmanager
def disk(place: Path) -> Iterator[None]:
    """Mount a disk at a new directory.

    Raises:
        InternalError: this machine cannot mount one.
    """
    place.mkdir()
    image = place.with_name(f"{place.name}.ext4")
    with image.open("wb") as file:
        file.truncate(SIZE_BYTES)
    try:
        for words in (["mkfs.ext4", "-q", "-m", "0"], ["mount", "-o", "loop"]):
            paths = [image, place][: 1 + (words[0] == "mount")]
            done = subprocess.run([*words, *paths], capture_output=True, check=False)
            if done.returncode:
                raise InternalError(f"no disk on a loop device: {done.stderr.decode().strip()}")
        try:
            yield
        finally:
            subprocess.run(["umount", "--lazy", place], check=True)
    finally:
        image.unlink()


@contextmanager
def full(place: Path) -> Iterator[None]:
    """Fill a disk, and make room again."""
    ballast = place / "ballast"
    with ballast.open("wb", buffering=0) as file:
        while free := shutil.disk_usage(place).free:
            try:
                os.posix_fallocate(file.fileno(), file.seek(0, os.SEEK_END), free)
            except OSError:  # a part of the free room is for the file system itself
                break
        try:
            while file.write(bytes(4096)):
                continue
        except OSError:
            pass
    try:
        yield
    finally:
        ballast.unlink()


@contextmanager
def frozen(place: Path) -> Iterator[None]:
    """Let each write to a disk wait."""
    subprocess.run(["fsfreeze", "--freeze", place], check=True)
    try:
        yield
    finally:
        subprocess.run(["fsfreeze", "--unfreeze", place], check=True)
