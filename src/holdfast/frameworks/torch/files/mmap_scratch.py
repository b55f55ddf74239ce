"""Tensors in a temporary file, so that they may be as large as the disk while the memory stays small.

Theory. torch writes and reads whole state dicts. Here their memory is a mapped temporary file beside the output: the
kernel writes its pages to the disk if memory is short. The file has no name, so it disappears even if the process is
killed. Its blocks are allocated before it is mapped, so a full disk gives a typed error and not a SIGBUS.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path

import torch

from holdfast.frameworks.torch.state.boxes import DTYPES
from holdfast.store.backends.durable_files import writing
from holdfast.store.layouts.layout import DTYPE_SIZE_BYTES

ALIGNMENT = 64


def scratch_tensors(
    wanted: Mapping[str, tuple[torch.dtype, Sequence[int]]], folder: Path
) -> dict[str, torch.Tensor]:
    """Return tensors of zeros in one temporary file in ``folder``, by name. Each tensor has separate storage.

    Args:
        wanted: dtype and shape of each tensor, by name.
        folder: an existing directory.

    Raises:
        StoreWriteError: the disk has too little room.
    """
    places: dict[str, int] = {}
    end = 0
    for name, (dtype, shape) in wanted.items():
        places[name] = end
        end += -(-prod(shape) * DTYPE_SIZE_BYTES[DTYPES[dtype]] // ALIGNMENT) * ALIGNMENT
    if not end:
        return {name: torch.zeros(tuple(shape), dtype=dtype) for name, (dtype, shape) in wanted.items()}
    with writing(folder), tempfile.TemporaryFile(dir=folder) as file:
        os.posix_fallocate(file.fileno(), 0, end)
        mapped = mmap.mmap(file.fileno(), end)
    made: dict[str, torch.Tensor] = {}
    for name, (dtype, shape) in wanted.items():
        count = prod(shape)
        flat = (
            torch.frombuffer(mapped, dtype=dtype, count=count, offset=places[name])
            if count
            else torch.zeros(0, dtype=dtype)
        )
        made[name] = flat.reshape(tuple(shape))
    return made
