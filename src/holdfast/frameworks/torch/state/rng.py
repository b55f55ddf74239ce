"""Random numbers as a function of (seed, stream, step), so that no generator state is saved or restored.

Every default generator (``random``, ``numpy.random``, torch on the CPU and on each initialised device) is seeded twice
per step: when the loop gives the step to the script, and when the block begins. A step that runs again, in this process
or another, therefore draws the same numbers. The stream of a rank, for each kind of generator, is chosen by
``frameworks/common/random_streams.py``. Samples of a dataset are seeded from (seed, epoch, index). So they depend
neither on the number of loader workers nor on the position at which a job resumes.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Final, NamedTuple

import numpy as np
import torch

from holdfast.frameworks.common.random_streams import Streams, digest_of_state

_MASK: Final = (1 << 64) - 1
_STEP: Final = 1
_SAMPLE: Final = 2
_ORDER: Final = 3
_FETCH: Final = 4
_BETWEEN: Final = 5
_LOADER: Final = 6

Generator = torch.Generator | np.random.Generator | random.Random


class Draws(NamedTuple):
    """The numbers of the streams that one copy of the model draws from, by kind of generator.

    Attributes:
        torch, device, numpy, python: default generators of torch on the CPU and on devices, of NumPy and of ``random``.
        named: the user's own generators in ``state=``.
    """

    torch: int
    device: int
    numpy: int
    python: int
    named: int

    @classmethod
    def same(cls, number: int) -> Draws:
        """Return draws from stream ``number`` for all kinds of generators."""
        return cls(*[number] * len(cls._fields))

    @classmethod
    def of(cls, streams: Streams | None, copy: int) -> Draws:
        """Return the streams that copy number ``copy`` draws from.

        Args:
            streams: the streams of all copies; None if each copy has separate streams.
            copy: number of the copy of the model.
        """
        if streams is None:
            return cls.same(copy)
        return cls(*[streams.number(kind, copy) for kind in cls._fields])


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
    seed_each(Draws.same(0), lambda _: value)


def seed_each(draws: Draws, seed_of: Callable[[int], int]) -> None:
    """Seed the default generators of ``random``, numpy and torch, each by its stream.

    Args:
        draws: numbers of the streams.
        seed_of: returns the 63-bit seed for the number of a stream.
    """
    seeds = {number: seed_of(number) for number in {*draws[:-1]}}
    random.seed(seeds[draws.python])
    np.random.seed(seeds[draws.numpy] & 0xFFFFFFFF)
    torch.default_generator.manual_seed(seeds[draws.torch])
    # torch.manual_seed checks every device type on each call: 100 us against 1 us of the line above.
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.manual_seed_all(seeds[draws.device])


def reseed(seed: int, draws: Draws, step: int, *, between: bool = False) -> None:
    """Seed all default generators for one step of the streams ``draws``, as a session does at each block.

    With ``between``, seed them for the code before the block.
    """
    seed_each(draws, lambda number: mix(_BETWEEN if between else _STEP, seed, number, step))


def generator_digests(generators: Iterable[tuple[str, Generator]]) -> dict[str, int]:
    """Return a digest of the present state of each kind of generator (``Draws``); waits for the device.

    Args:
        generators: the user's own generators, by name.
    """
    on_device = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    states: dict[str, object] = {
        "torch": torch.get_rng_state().numpy().tobytes(),
        "device": torch.cuda.get_rng_state().numpy().tobytes() if on_device else b"",
        "numpy": np.random.get_state(legacy=False),
        "python": random.getstate(),
        "named": {name: _state_of(generator) for name, generator in sorted(generators)},
    }
    return {kind: digest_of_state(state) for kind, state in states.items()}


def _state_of(generator: Generator) -> object:
    if isinstance(generator, torch.Generator):
        return generator.get_state().numpy().tobytes()
    return generator.getstate() if isinstance(generator, random.Random) else generator.bit_generator.state


def reseed_generators(
    generators: Iterable[tuple[str, Generator]], seed: int, stream: int, step: int, *, between: bool = False
) -> None:
    """Seed the user's own generators for one step of a stream. The seed of each also depends on its name.

    With ``between``, seed them for the code before the block.
    """
    for name, generator in generators:
        value = mix(_BETWEEN if between else _STEP, seed, stream, step, *name.encode())
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


class RandomNumbers:
    """The random numbers of the steps of one session.

    Args:
        seed: seed of the session.

    Attributes:
        streams: the streams of all copies of the model; None if each copy has separate streams.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.streams: Streams | None = None

    def draws(self, copy: int) -> Draws:
        """Return the streams of copy number ``copy`` of the model."""
        return Draws.of(self.streams, copy)

    def begin(
        self, copy: int, step: int, named: Iterable[tuple[str, Generator]], *, between: bool = False
    ) -> None:
        """Seed the default generators, and the user's ``named`` generators, for one step of copy number ``copy``.

        With ``between``, seed them for the code before the block.
        """
        draws = self.draws(copy)
        reseed(self.seed, draws, step, between=between)
        reseed_generators(named, self.seed, draws.named, step, between=between)


def loader_seed(seed: int, number: int) -> int:
    """Return the seed of loader ``number`` of a loop, so that two loaders do not draw the same order.

    The first loader has the seed of the session.
    """
    return mix(_LOADER, seed, number) if number else seed


def order_seed(seed: int, epoch: int, stream: int) -> int:
    """Return the seed from which a sampler draws its order in one epoch."""
    return mix(_ORDER, seed, epoch, stream)


def fetch_seed(seed: int, epoch: int, batch: int, stream: int) -> int:
    """Return the seed for one batch of an iterable of unknown type that draws random numbers in the main process."""
    return mix(_FETCH, seed, epoch, batch, stream)


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
