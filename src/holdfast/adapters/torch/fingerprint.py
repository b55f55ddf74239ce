"""Digests of parts of the state: by xxh3 where the memory can be read, else by sums on the device.

On a device all parts are laid end to end and read as 64-bit integers; their sum and their sum with odd weights, modulo
2**64, are what is hashed. One changed bit always changes the first sum; integer arithmetic has no order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
import xxhash

from holdfast.adapters.torch.boxes import byte_view, flat_bytes, is_direct
from holdfast.store.copies import Extent
from holdfast.store.layout import Box

CHUNK_WORDS = 8 * 1024 * 1024
_WORD_BYTES = 8


class Regions(Protocol):
    """What is used of a collected state."""

    def region(self, fqn: str, box: Box) -> torch.Tensor:
        """The tensor of one box."""


class Fingerprints:
    """Takes digests of one collected state; keeps the memory that it has looked up."""

    def __init__(self, state: Regions) -> None:
        self.state = state
        self._memory: dict[tuple[str, Box], memoryview | None] = {}

    def digest(self, parts: Sequence[Extent]) -> int:
        """xxh3-64 of these parts, in order; equal bytes give equal digests on every rank with the same devices."""
        total = xxhash.xxh3_64()
        far: list[torch.Tensor] = []
        for fqn, box, start, stop in parts:
            memory = self._direct(fqn, box)
            if memory is None:
                region = self.state.region(fqn, box)
                far.append(flat_bytes(region)[start:stop])
            else:
                total.update(memory[start:stop])
        if far:
            total.update(sums(far))
        return total.intdigest()

    def _direct(self, fqn: str, box: Box) -> memoryview | None:
        key = (fqn, box)
        if key not in self._memory:
            region = self.state.region(fqn, box)
            self._memory[key] = byte_view(region) if is_direct(region) else None
        return self._memory[key]


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
