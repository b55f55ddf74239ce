"""Digests of values of the script, equal in all processes: of tensors, modules, arrays, plain values and containers."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Set
from typing import Any, TypeVar

import numpy as np
import torch
import xxhash

from holdfast.frameworks.torch.state.boxes import local_of
from holdfast.frameworks.torch.state.tensor_digest import digest_of_tensor
from holdfast.frameworks.torch.state.tensor_memory import address_of

T = TypeVar("T", torch.Tensor, np.ndarray[Any, Any])
_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_DIGEST_BYTES = 16
SIZE_BYTES_MAX = 256 << 20
"""Larger tensors and arrays count by a sample of their elements, at equal distances."""


class _Unknown(Exception):
    """A value whose content is not known."""


def digest_of_content(value: object, left_out: Set[int] = frozenset()) -> int | None:
    """Return a digest of the content of ``value``. Waits for the device.

    The accepted types are dense tensors, modules, arrays, plain values, and lists, tuples, deques, sets and dicts of
    these. For any other object in ``value``, return None. Of a module, parameters and buffers count. The content of a
    file that is mapped into memory does not count.

    Args:
        left_out: addresses of memory (``tensor_memory.address_of``). The numbers of tensors there do not count.
    """
    total = xxhash.xxh3_64()
    try:
        for part in _parts(value, left_out):
            total.update(part)
    except (_Unknown, RecursionError):
        return None
    return total.intdigest()


def _sample(value: T) -> T:
    """Return the tensor or array ``value``. If it is large, return elements of it at equal distances."""
    distance = -(-value.nbytes // SIZE_BYTES_MAX)
    return value.reshape(-1)[::distance] if distance > 1 else value


def _parts(value: object, left_out: Set[int]) -> Iterator[bytes]:
    """Yield bytes that identify ``value``. Raises: _Unknown: it has an object of another type."""
    if isinstance(value, torch.Tensor):
        yield f"tensor {value.dtype} {tuple(value.shape)}".encode()
        if value.layout != torch.strided:
            raise _Unknown
        if not value.is_meta and address_of(value) not in left_out:
            yield digest_of_tensor(_sample(local_of(value))).to_bytes(_DIGEST_BYTES, "little")
    elif isinstance(value, torch.nn.Module):
        yield from _parts({**dict(value.named_parameters()), **dict(value.named_buffers())}, left_out)
    elif isinstance(value, np.ndarray) and value.dtype.kind in "biufcSU":
        yield f"array {value.dtype.str} {value.shape}".encode()
        if not isinstance(value, np.memmap):  # a file, which may be far larger than the memory
            yield _sample(value).tobytes()
    elif isinstance(value, np.generic):
        yield from _parts(value.item(), left_out)
    elif type(value) in _PLAIN:
        yield repr(value).encode("utf-8", "surrogatepass")
    elif isinstance(value, dict):
        yield b"{"
        for key, item in value.items():
            yield from _parts(key, left_out)
            yield from _parts(item, left_out)
        yield b"}"
    elif isinstance(value, list | tuple | deque):
        yield b"["
        if all(type(item) in _PLAIN for item in value):  # a million numbers, without a call for each
            yield repr(list(value)).encode("utf-8", "surrogatepass")
        else:
            for item in value:
                yield from _parts(item, left_out)
        yield b"]"
    elif isinstance(value, set | frozenset):
        yield b"set"
        yield from _parts(sorted(value, key=repr), left_out)
    else:
        raise _Unknown
