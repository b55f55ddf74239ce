"""A digest of a batch that a loader drew: cheap, and equal in every process that draws the same batch.

It covers, by type:

- a tensor or an array: shape, dtype and fewer than 512 of its elements, evenly spread;
- a tensor on a device: shape and dtype only, because reading it would wait for the device;
- numbers, texts and bytes: the value (of long texts the length and the beginning);
- containers: their items, up to 64 in all;
- other objects (SpeechBrain's ``PaddedBatch``): the type, and the tensors and arrays in their attributes. Other values
  there are left out, because an object may keep times or addresses in them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

import numpy as np
import torch
import xxhash

ELEMENTS_MAX = 256
LEAVES_MAX = 64
INNER_MAX = 1000  # values that are visited in the attributes of one object
TEXT_MAX = 4096


def digest_of_batch(batch: Any) -> int:
    """Return the 64-bit digest of a batch; 0 if the digest would cover no values of the batch, but only types.

    Example:
        >>> digest_of_batch([1, "a"]) == digest_of_batch([1, "a"])
        True
    """
    total, known = xxhash.xxh3_64(), False
    for number, (path, leaf) in enumerate(_leaves(batch, "")):
        if number == LEAVES_MAX:
            break
        total.update(path.encode(errors="replace"))
        known = _add(total, leaf) or known
    return int(total.intdigest()) if known else 0


def _leaves(item: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(item, Mapping):
        for key, value in item.items():
            yield from _leaves(value, f"{path}.{key}")
    elif isinstance(item, list | tuple):
        for index, value in enumerate(item):
            yield from _leaves(value, f"{path}.{index}")
    else:
        yield path, item
        if not isinstance(item, torch.Tensor | np.ndarray):
            yield from _inner(item, path)


def _inner(item: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Yield the tensors and arrays in the attributes of an object, with their paths."""
    waiting = deque([(path, item)])
    seen: dict[int, Any] = {}  # by id; holds the objects, so that no id is used twice
    while waiting and len(seen) < INNER_MAX:
        path, item = waiting.popleft()
        if id(item) in seen:
            continue
        seen[id(item)] = item
        if isinstance(item, torch.Tensor | np.ndarray):
            yield path, item
        else:
            waiting.extend((f"{path}.{key}", value) for key, value in islice(_parts(item), INNER_MAX))


def _parts(item: Any) -> Iterator[tuple[object, Any]]:
    """Return the keys and values of a container or of an object with attributes; for other values nothing."""
    if isinstance(item, Mapping):
        return iter(item.items())
    if isinstance(item, list | tuple):
        return iter(enumerate(item))
    return iter({} if isinstance(item, type) else getattr(item, "__dict__", {}).items())


def _add(total: xxhash.xxh3_64, leaf: Any) -> bool:
    """Add a leaf to the digest; return False if only its type was added."""
    if isinstance(leaf, torch.Tensor):
        total.update(f"tensor{leaf.dtype}{tuple(leaf.shape)}".encode())
        if _is_plain(leaf):
            total.update(_sampled(_elements(leaf)).tobytes())
    elif isinstance(leaf, np.ndarray):
        total.update(f"array{leaf.dtype}{leaf.shape}".encode())
        if not leaf.dtype.hasobject:
            total.update(_sampled(leaf.reshape(-1)).tobytes())
    elif isinstance(leaf, str | bytes):
        total.update(repr((len(leaf), leaf[:TEXT_MAX])).encode())
    elif isinstance(leaf, bool | int | float | complex):
        total.update(repr(leaf).encode())
    else:
        total.update(type(leaf).__name__.encode())
        return False
    return True


def _is_plain(leaf: torch.Tensor) -> bool:
    dense = leaf.layout is torch.strided and not leaf.is_quantized
    return leaf.device.type == "cpu" and dense and type(leaf) is torch.Tensor


def _elements(leaf: torch.Tensor) -> Any:
    """Return the elements of a tensor as a flat array, or its bytes if numpy lacks the dtype."""
    flat = leaf.detach().resolve_conj().resolve_neg().reshape(-1)
    try:
        return flat.numpy()
    except TypeError:  # bfloat16 and smaller
        return flat.view(torch.uint8).numpy()


def _sampled(flat: Any) -> Any:
    """Return evenly spaced elements of a flat array, fewer than twice ``ELEMENTS_MAX``, at an odd distance.

    With an even distance, all elements could come from one column of rows of a usual width.
    """
    return flat[:: len(flat) // ELEMENTS_MAX | 1]
