"""Digests of parts of the state: xxh3 of CPU memory in C order, and sums computed on the device for other tensors.

On a device all parts are joined end to end and read as 64-bit integers. Two sums modulo 2**64, one plain and one with
odd weights, are hashed. One changed bit always changes the plain sum. Integer sums do not depend on the order of
additions. The sums of chunks are added, so a device needs memory for only four chunks beside the state, however large
the state is.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

import torch
import xxhash

from holdfast.frameworks.torch import private_api
from holdfast.frameworks.torch.state.boxes import flat_bytes, lies_in_order, local_of, stretch
from holdfast.store.layouts.box import Extent
from holdfast.store.layouts.layout import Box

_WORD_BYTES = 8
CHUNK_WORDS = 2 * 1024 * 1024  # 16 MiB: enough to keep a device busy while the next kernel is launched
PIECES_OF_CHUNK = 8  # a tensor that is not in C order is copied in pieces of 1/8 chunk


class Regions(Protocol):
    """The part of a :class:`TorchCollected` (the state of a rank at one moment) that this module uses."""

    def own(self, fqn: str, box: Box) -> memoryview | None:
        """Return the memory of one box if it holds the bytes in C order on the CPU; otherwise None."""

    def region(self, fqn: str, box: Box) -> torch.Tensor:
        """Return the tensor of one box."""


def digest_of_tensor(tensor: torch.Tensor) -> int:
    """Return a digest of this rank's part of a tensor: 64 bits on the CPU, 128 on a device. Waits for the device."""
    if tensor.is_sparse:
        tensor = torch.cat([part.reshape(-1).double() for part in private_api.sparse_parts(tensor)])
    local = local_of(tensor)
    if not local.numel():
        return 0
    flat = flat_bytes(local)  # in C order, so that strides do not matter
    if flat.device.type == "cpu":
        return xxhash.xxh3_64_intdigest(flat.numpy().data)
    return int.from_bytes(sums([flat]), "little")


def digest_of(state: Regions, parts: Sequence[Extent]) -> int:
    """Return the xxh3-64 digest of ``parts``, byte ranges of the state, in order.

    Equal bytes give equal digests on every rank with the same devices.
    """
    total = xxhash.xxh3_64()
    far: dict[torch.device, list[Extent]] = {}  # in the order of the first part on each device
    for part in parts:
        memory = state.own(part.fqn, part.box)
        if memory is None:
            far.setdefault(state.region(part.fqn, part.box).device, []).append(part)
        else:
            total.update(memory[part.start : part.stop])
    for extents in far.values():
        total.update(sums(_pieces(state, extents)))
    return total.intdigest()


def _pieces(state: Regions, extents: Sequence[Extent]) -> Iterator[torch.Tensor]:
    """Yield the bytes of each of ``extents`` (a byte range of a box) on its device.

    A tensor in C order is not copied. Other tensors are copied piece by piece.
    """
    piece_bytes = CHUNK_WORDS * _WORD_BYTES // PIECES_OF_CHUNK
    for extent in extents:
        region = state.region(extent.fqn, extent.box)
        if lies_in_order(region):
            yield from stretch(region, extent.start, extent.stop)
        else:
            for at in range(extent.start, extent.stop, piece_bytes):
                yield from stretch(region, at, min(at + piece_bytes, extent.stop))


def sums(parts: Iterable[torch.Tensor]) -> bytes:
    """Return the plain and the weighted sum modulo 2**64 over the bytes of ``parts``: 16 bytes, little-endian.

    Args:
        parts: uint8 tensors of one dimension, all on one device.
    """
    found = plain = weighted = 0
    with torch.no_grad():
        totals: torch.Tensor | None = None
        for chunk in _chunks(parts):
            now = _sums_of(chunk, found)
            totals = now if totals is None else totals + now
            found += -(-len(chunk) // _WORD_BYTES)
        if totals is not None:
            plain, weighted = totals.tolist()
    modulus = 1 << 64
    return b"".join((int(n) % modulus).to_bytes(8, "little") for n in (plain, weighted))


def _sums_of(chunk: torch.Tensor, found: int) -> torch.Tensor:
    """Return the plain and the weighted sum of the 64-bit words of one chunk: int64 [2].

    Args:
        chunk: uint8 [n].
        found: number of 64-bit words before this chunk.
    """
    words = _words(chunk)
    odd = torch.arange(1, 2 * len(words), 2, dtype=torch.int64, device=words.device)
    alone = words.sum()
    # A word's weight in the whole is its weight in the chunk plus twice the number of words before the chunk.
    return torch.stack((alone, odd.mul_(words).sum() + alone * (2 * found)))


def _chunks(parts: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Yield the bytes of all tensors in ``parts`` as chunks of equal size; the last chunk may be shorter.

    The tensors are read end to end. So a chunk may have bytes of several small tensors.
    """
    chunk_bytes = CHUNK_WORDS * _WORD_BYTES
    held: list[torch.Tensor] = []
    room = chunk_bytes
    for part in parts:
        at = 0
        while at < len(part):
            taken = part[at : at + room]
            held.append(taken)
            at, room = at + len(taken), room - len(taken)
            if not room:
                yield _joined(held)
                room = chunk_bytes
    if held:
        yield _joined(held)


def _joined(held: list[torch.Tensor]) -> torch.Tensor:
    """Return the tensors of ``held`` joined into one. Empty ``held``, so that its memory is free for the next chunk."""
    joined = held[0] if len(held) == 1 else torch.cat(held)
    held.clear()
    return joined


def _words(chunk: torch.Tensor) -> torch.Tensor:
    """Return a chunk as 64-bit integers: in place if it is aligned to words, otherwise a copy, padded with zeros."""
    lacking = -len(chunk) % _WORD_BYTES
    if lacking:
        chunk = torch.nn.functional.pad(chunk, (0, lacking))
    elif chunk.data_ptr() % _WORD_BYTES or chunk.storage_offset() % _WORD_BYTES:
        chunk = chunk.clone()
    return chunk.view(torch.int64)
