"""What adapters have in common whose ranks add up over our own connections (``mesh.py``)."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

import numpy as np

from holdfast.adapters.base import Hooks
from holdfast.adapters.mesh import Mesh, host_of
from holdfast.core.ids import NO_GENERATION
from holdfast.runtime.client import Client

SEED_PRIME = 1_000_003
BETWEEN = 1 << 40
"""Steps from here on are seeds of what is drawn between two blocks."""


class State(Protocol):
    """The state of such an adapter."""

    def take_before(self, step: int) -> None:
        """Copy what the script may change before it enters the block of ``step``."""


Kept = TypeVar("Kept", bound=State)


class Meshed(Generic[Kept]):
    """Part of an :class:`holdfast.adapters.base.Adapter`.

    Args:
        rank, world_size: place of this process.
        seed: of Python's and NumPy's generators at each step.
    """

    scaled = False
    state: Kept

    def __init__(self, rank: int, world_size: int, seed: int) -> None:
        self.rank = rank
        self.world_size = world_size
        self._seed = seed
        self._mesh: Mesh | None = None
        self._hooks: Hooks | None = None

    def _lines(self) -> Mesh:
        """Our connections, not met before they are used: the session finds its agent first."""
        if self._mesh is None:
            client = Client.current()
            self._mesh = Mesh(client, self.rank, self.world_size, host_of(client))
        return self._mesh

    @property
    def mesh(self) -> Mesh:
        """Our connections; meets the other ranks at first use. Raises: GroupError."""
        mesh = self._lines()
        if not mesh.connected:
            client = Client.current()
            mesh.connect(NO_GENERATION if client is None else client.generation)
        return mesh

    @property
    def poisoned(self) -> bool:
        """A collective of this process broke."""
        return self._mesh is not None and self._mesh.poisoned

    @property
    def reason(self) -> str:
        """Why."""
        return "" if self._mesh is None else self._mesh.reason

    def attach(
        self, hooks: Hooks, on_fault: Callable[[str], None], on_collective: Callable[[int, str], None]
    ) -> None:
        """Note whom to call."""
        self._hooks = hooks
        self._lines().on_fault = on_fault
        self._lines().on_collective = on_collective

    def detach(self) -> None:
        """Close the connections."""
        self._hooks = None
        if self._mesh is not None:
            self._mesh.close()

    def _broke(self, reason: str) -> None:
        """A collective of the framework's own broke: tell the others at once."""
        if not self.poisoned:
            self._lines().poison(reason)
            self._lines().on_fault(reason)

    def _reseed(self, step: int) -> int:
        """Seed Python and NumPy for one step; returns the number that the framework's own seed is made of."""
        mixed = (self._seed * SEED_PRIME + self.rank) * SEED_PRIME + step
        random.seed(mixed)
        np.random.seed(mixed % 2**32)
        return mixed

    def between(self, step: int, part: int, *, again: bool) -> None:
        """Seed Python and NumPy, and copy what the script may change."""
        self._reseed(BETWEEN + step)
        if not again:
            self.remember(step)

    def remember(self, step: int, *, whole: bool = False) -> None:
        """Copy learning rates and the user's state."""
        self.state.take_before(step)

    def vote(self, vector: list[int]) -> list[int]:
        """Sum over all ranks. Raises: PeerLost."""
        return [int(n) for n in self.mesh.sum(np.array(vector, np.int64))]

    def poison(self, reason: str) -> None:
        """Break all sums under way. A hang in the framework's own collectives ends with the process."""
        if self._mesh is not None:
            self._mesh.poison(reason)

    def enter_update(self) -> None:
        """Nothing."""

    def end_rehearsal(self) -> None:
        """Nothing."""
