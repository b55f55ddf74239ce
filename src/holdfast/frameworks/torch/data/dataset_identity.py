"""The identity of a dataset: its length, and its content if that can be read without running the user's code.

To read samples would run ``__getitem__`` at a time that the user does not expect. That code may draw from the user's
own generator, or open files before loader workers are forked. So content is read in two cases only: it lies in memory
(tensors, lists, ``Subset`` and ``ConcatDataset`` of them, the file lists of image folders), or the dataset has an
attribute ``fingerprint``, for example the checksum of a file.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import xxhash
from torch.utils.data import ConcatDataset, Subset, TensorDataset

from holdfast.frameworks.common.adapter import DataIdentity
from holdfast.frameworks.torch.state.boxes import byte_view

LOOKED_AT = 16
"""Number of rows or entries of a dataset that are read, evenly spread."""


def identity(dataset: Any, shared: bool) -> DataIdentity | None:
    """Return length and, if known, content digest of a map-style dataset; None if it has no length.

    Args:
        shared: True if the ranks draw different samples of one dataset, so that all must have the same dataset.
    """
    try:
        length = len(dataset)
    except TypeError:
        return None
    total = xxhash.xxh3_64()
    known = _look(dataset, total)
    return DataIdentity(length, total.hexdigest() if known else "", shared)


def _look(item: Any, total: xxhash.xxh3_64) -> bool:
    """Add the content of ``item`` to the digest ``total``; return False if the content cannot be read."""
    said = getattr(item, "fingerprint", None)
    if isinstance(said, str | int):
        total.update(str(said).encode())
        return True
    if isinstance(item, Subset):
        return _look(item.dataset, total) and _look(list(item.indices), total)
    if isinstance(item, ConcatDataset):
        return all(_look(part, total) for part in item.datasets)
    if type(item) is TensorDataset:
        return all(_look(tensor, total) for tensor in item.tensors)
    if isinstance(item, torch.Tensor | np.ndarray):
        rows = torch.as_tensor(item).detach()
        chosen = rows[_some(len(rows))] if rows.ndim else rows
        total.update(f"{rows.dtype}{tuple(rows.shape)}".encode())
        total.update(byte_view(chosen))
        return True
    files = getattr(item, "samples", None)  # torchvision's folders: (path, class)
    if isinstance(files, list):
        item = [(str(entry[0]).rpartition("/")[2], *entry[1:]) for entry in files if isinstance(entry, tuple)]
    if type(item) not in (list, tuple):
        return False
    return all(_look_at_entry(item[i], total) for i in _some(len(item)))


def _look_at_entry(entry: Any, total: xxhash.xxh3_64) -> bool:
    if isinstance(entry, str | bytes | int | float | bool | None):
        total.update(repr(entry).encode())
        return True
    if isinstance(entry, dict):
        return all(_look_at_entry(part, total) for pair in sorted(entry.items()) for part in pair)
    if isinstance(entry, list | tuple):
        return all(_look_at_entry(part, total) for part in entry)
    return isinstance(entry, torch.Tensor | np.ndarray) and _look(entry, total)


def _some(length: int) -> Sequence[int]:
    """Return at most :data:`LOOKED_AT` evenly spread indices of ``length`` entries, with the first and the last."""
    if length <= LOOKED_AT:
        return list(range(length))
    return [i * (length - 1) // (LOOKED_AT - 1) for i in range(LOOKED_AT)]
