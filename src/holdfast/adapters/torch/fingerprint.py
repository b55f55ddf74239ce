"""Digests of parts of the state: by xxh3 where the memory can be read, else by sums on the device.

On a device all parts are laid end to end and read as 64-bit integers; their sum and their sum with odd weights, modulo
2**64, are what is hashed. One changed bit always changes the first sum; integer arithmetic has no order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
import xxhash

from holdfast.adapters.torch.boxes import flat_bytes
from holdfast.store.copies import Extent
from holdfast.store.layout import Box

CHUNK_WORDS = 8 * 1024 * 1024
_WORD_BYTES = 8


class Regions(Protocol):
    """What is used of a collected state."""

    def own(self, fqn: str, box: Box) -> memoryview | None:
        """The memory of one box, where that is its bytes."""

    def region(self, fqn: str, box: Box) -> torch.Tensor:
        """The tensor of one box."""


def digest_of(state: Regions, parts: Sequence[Extent]) -> int:
    """xxh3-64 of these parts, in order; equal bytes give equal digests on every rank with the same devices."""
    total = xxhash.xxh3_64()
    far: list[torch.Tensor] = []
    for fqn, box, start, stop in parts:
        memory = state.own(fqn, box)
        if memory is None:
            far.append(flat_bytes(state.region(fqn, box))[start:stop])
        else:
            total.update(memory[start:stop])
    if far:
        total.update(sums(far))
    return total.intdigest()


def sums(parts: Sequence[torch.Tensor]) -> bytes:
    """Two sums modulo 2**64 over the bytes of ``parts`` (uint8, one dimension each) on their device."""
    with torch.no_grad():
        joined = torch.cat(list(parts))
        words = torch.nn.functional.pad(joined, (0, -len(joined) % _WORD_BYTES)).view(torch.int64)
        found = []
        for at in range(0, len(words), CHUNK_WORDS):
            chunk = words[at : at + CHUNK_WORDS]
            first = 2 * at + 1
            odd = torch.arange(first, first + 2 * len(chunk), 2, dtype=torch.int64, device=chunk.device)
            found.append(torch.stack((chunk.sum(), odd.mul_(chunk).sum())))
        plain, weighted = torch.stack(found).sum(0).tolist()
    modulus = 1 << 64
    return b"".join((int(n) % modulus).to_bytes(8, "little") for n in (plain, weighted))
