"""What adapters have in common whose ranks add up over our own connections (``tcp_group.py``)."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from holdfast.core.ids import NO_GENERATION
from holdfast.frameworks.common.adapter import Collected, Hooks
from holdfast.frameworks.common.numpy_state import digest_of
from holdfast.frameworks.common.replica_comparison import HeldBox, broadcast, differences, refuse
from holdfast.frameworks.common.tcp_group import TcpGroup, group_address
from holdfast.runtime.worker.worker_client import WorkerClient
from holdfast.store.layouts.replica_digests import Extent
from holdfast.text import plural

log = logging.getLogger("holdfast")

SEED_PRIME = 1_000_003
BETWEEN = 1 << 40
"""Steps from here on are seeds of what is drawn between two blocks."""


class AdapterState(Protocol):
    """The state of such an adapter."""

    def take_before(self, step: int) -> None:
        """Copy what the script may change before it enters the block of ``step``."""

    def collect(self, *, frozen: bool) -> Collected:
        """The state now, or at the start of the open step."""

    def trains(self, fqn: str) -> bool:
        """Updates alone change this tensor: a weight, or state of the optimizer."""

    def owns(self, fqn: str) -> bool:
        """The tensor is the framework's, and not the user's own."""

    def put_bytes(self, arrays: Mapping[str, NDArray[np.uint8]]) -> None:
        """Set tensors of this rank from their bytes."""


Kept = TypeVar("Kept", bound=AdapterState)


class TcpGroupAdapter(Generic[Kept]):
    """Part of an :class:`holdfast.frameworks.common.adapter.Adapter`.

    Args:
        rank, world_size: place of this process.
        seed: of Python's and NumPy's generators at each step.
    """

    scaled = False
    trains_alone = False  # the gate, or the strategy, adds up in every block
    state: Kept

    def __init__(self, rank: int, world_size: int, seed: int) -> None:
        self.rank = rank
        self.world_size = world_size
        self._seed = seed
        self._mesh: TcpGroup | None = None
        self._hooks: Hooks | None = None

    def _lines(self) -> TcpGroup:
        """Our connections, not met before they are used: the session finds its agent first."""
        if self._mesh is None:
            client = WorkerClient.current()
            self._mesh = TcpGroup(client, self.rank, self.world_size, *group_address(client))
        return self._mesh

    @property
    def mesh(self) -> TcpGroup:
        """Our connections; meets the other ranks at first use. Raises: GroupError."""
        mesh = self._lines()
        if not mesh.connected:
            client = WorkerClient.current()
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

    # ------------------------------------------------------------------ copies

    def begin_equal(self) -> None:
        """Before the first step of a fresh job: the copies of the state are the same on all ranks.

        Raises:
            StateError: they are not, and the script does not ask for a broadcast; by name.
            PeerLost: a rank is gone.
        """
        if self.world_size == 1:
            return
        collected = self.state.collect(frozen=False)
        tensors = collected.layout(self.rank, self.world_size).tensors
        held = [
            HeldBox(meta, collected.view(meta.fqn, meta.box)) for meta in tensors if self.state.owns(meta.fqn)
        ]
        found = differences(self.mesh.sum, self.rank, self.world_size, held)
        if not found:
            return
        if not self._broadcasts():
            refuse(held, found, self._remedy())
        self.state.put_bytes(broadcast(self.mesh.sum, self.rank, held, found))
        if self.rank == 0:
            said = plural(len(found), "parameter")
            log.info("holdfast: %s began different: all ranks begin with the lowest rank's", said)

    def _broadcasts(self) -> bool:
        """The script asks that all ranks begin with the same values."""
        return False

    def _remedy(self) -> str:
        """What makes ranks begin with the same values."""
        return "give all ranks the same seed before they make the model"

    def compares(self, fqn: str) -> bool:
        """Weights and state of the optimizer (``frameworks.common.adapter.ComparesCopies``)."""
        return self.state.trains(fqn)

    def digest(self, collected: Collected, parts: Sequence[Extent]) -> int:
        """64-bit digest of parts of the state (``frameworks.common.adapter.ComparesCopies``)."""
        return digest_of(self._of_vote() or collected, parts)

    def _of_vote(self) -> Collected | None:
        """The state that the vote under way is about; None: no vote is."""
        return None

    def poison(self, reason: str) -> None:
        """Break all sums under way. A hang in the framework's own collectives ends with the process."""
        if self._mesh is not None:
            self._mesh.poison(reason)

    def enter_update(self) -> None:
        """Nothing."""

    def end_rehearsal(self) -> None:
        """Nothing."""
