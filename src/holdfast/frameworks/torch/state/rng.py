"""Random numbers as a function of (seed, rank, step), so that no generator state is saved or restored.

Every default generator (``random``, ``numpy.random``, torch on the CPU and on each initialised device) is seeded twice
per step: when the loop gives the step to the script, and when the block begins. A step that runs again, in this process
or another, therefore draws the same numbers. Samples of a dataset are seeded from (seed, epoch, index). So they depend
neither on the number of loader workers nor on the position at which a job resumes.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Final

import numpy as np
import torch

_MASK: Final = (1 << 64) - 1
_STEP: Final = 1
_SAMPLE: Final = 2
_ORDER: Final = 3
_FETCH: Final = 4
_BETWEEN: Final = 5

Generator = torch.Generator | np.random.Generator | random.Random


def mix(*words: int) -> int:
    """Return one 63-bit seed computed from integers, by splitmix64 over each in turn; their order matters."""
    state = 0x243F6A8885A308D3
    for word in words:
        state = (state ^ (word & _MASK)) & _MASK
        state = (state + 0x9E3779B97F4A7C15) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state >> 1


def seed_all(value: int) -> None:
    """Seed the default generators of ``random``, numpy and torch (all initialised devices) from a 63-bit value."""
    random.seed(value)
    np.random.seed(value & 0xFFFFFFFF)
    torch.default_generator.manual_seed(value)
    # torch.manual_seed checks every device type on each call: 100 us against 1 us of the line above.
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.manual_seed_all(value)


def reseed(seed: int, rank: int, step: int, *, between: bool = False) -> None:
    """Seed all default generators for one step of ``rank``, as a session does at the start of each block.

    With ``between``, seed them for the code before the block.
    """
    seed_all(mix(_BETWEEN if between else _STEP, seed, rank, step))


def reseed_generators(
    generators: Iterable[tuple[str, Generator]], seed: int, rank: int, step: int, *, between: bool = False
) -> None:
    """Seed the user's own generators for one step. The seed of each also depends on its name.

    With ``between``, seed them for the code before the block.
    """
    for name, generator in generators:
        value = mix(_BETWEEN if between else _STEP, seed, rank, step, *name.encode())
        if isinstance(generator, torch.Generator):
            generator.manual_seed(value)
        elif isinstance(generator, random.Random):
            generator.seed(value)
        else:
            fresh = type(generator.bit_generator)(value)
            generator.bit_generator.state = fresh.state


def sample_seed(seed: int, epoch: int, index: int) -> int:
    """Return the seed of one sample, the same on every rank and in every loader worker."""
    return mix(_SAMPLE, seed, epoch, index)


def order_seed(seed: int, epoch: int, rank: int) -> int:
    """Return the seed from which a sampler draws its order in one epoch."""
    return mix(_ORDER, seed, epoch, rank)


def fetch_seed(seed: int, epoch: int, batch: int, rank: int) -> int:
    """Return the seed for one batch of an iterable of unknown type that draws random numbers in the main process."""
    return mix(_FETCH, seed, epoch, batch, rank)


@contextmanager
def isolated() -> Iterator[None]:
    """Restore the default generators of the CPU (``random``, numpy, torch) at the end of the ``with`` block."""
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])
