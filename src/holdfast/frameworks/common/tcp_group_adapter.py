"""The common part of adapters whose ranks sum over Holdfast's own TCP connections (``tcp_group.py``)."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from holdfast.core.ids import NO_GENERATION
from holdfast.frameworks.common.adapter import Collected, Hooks, OnCollective
from holdfast.frameworks.common.numpy_state import digest_of
from holdfast.frameworks.common.random_streams import Streams, compare_generators, digest_of_state
from holdfast.frameworks.common.replica_comparison import HeldBox, broadcast, differences, refuse
from holdfast.frameworks.common.tcp_group import TcpGroup, group_address
from holdfast.runtime.worker.worker_client import WorkerClient
from holdfast.store.layouts.box import Extent
from holdfast.text import plural

log = logging.getLogger("holdfast")

SEED_PRIME = 1_000_003
BETWEEN = 1 << 40
"""Added to the step to seed the code between two blocks, so that its seeds differ from those of blocks."""


class AdapterState(Protocol):
    """The training state that a :class:`TcpGroupAdapter` saves, compares and restores."""

    def take_before(self, step: int) -> None:
        """Copy the state that the script may change before it enters the block of ``step``."""

    def collect(self, *, frozen: bool) -> Collected:
        """Return the present state, or, if ``frozen``, the state at the start of the current step."""

    def trains(self, fqn: str) -> bool:
        """Return True if only updates change this tensor: a weight, or state of the optimizer."""

    def owns(self, fqn: str) -> bool:
        """Return True if the tensor belongs to the framework and not to the user's own state."""

    def put_bytes(self, arrays: Mapping[str, NDArray[np.uint8]]) -> None:
        """Overwrite tensors of this rank with these bytes, by tensor name."""


Kept = TypeVar("Kept", bound=AdapterState)


class TcpGroupAdapter(Generic[Kept]):
    """The common part of the adapters whose votes and sums use a TCP group.

    Args:
        rank, world_size: rank of this process and the number of ranks.
        seed: base of the seeds of Python's and NumPy's generators at each step.
    """

    scaled = False
    trains_alone = False  # MindSpore's gate, or TensorFlow's strategy, sums over the ranks in every block
    state: Kept

    def __init__(self, rank: int, world_size: int, seed: int) -> None:
        self.rank = rank
        self.world_size = world_size
        self._seed = seed
        self.streams: Streams | None = None
        self._mesh: TcpGroup | None = None
        self._hooks: Hooks | None = None

    def _lines(self) -> TcpGroup:
        """Return the TCP group of this process, which may not be connected yet.

        The group connects only at its first use, because the session must first find its agent.
        """
        if self._mesh is None:
            client = WorkerClient.current()
            self._mesh = TcpGroup(client, self.rank, self.world_size, *group_address(client))
        return self._mesh

    @property
    def mesh(self) -> TcpGroup:
        """The TCP group, connected to the other ranks at first use. Raises: GroupError."""
        mesh = self._lines()
        if not mesh.connected:
            client = WorkerClient.current()
            mesh.connect(NO_GENERATION if client is None else client.generation)
        return mesh

    @property
    def poisoned(self) -> bool:
        """True after a collective of this process broke."""
        return self._mesh is not None and self._mesh.poisoned

    @property
    def reason(self) -> str:
        """The reason why the collectives of this process are poisoned; empty if they are not."""
        return "" if self._mesh is None else self._mesh.reason

    def attach(self, hooks: Hooks, on_fault: Callable[[str], None], on_collective: OnCollective) -> None:
        """Set the session's functions: ``hooks`` for events of a step, ``on_fault``, ``on_collective``."""
        self._hooks = hooks
        self._lines().on_fault = on_fault
        self._lines().on_collective = on_collective

    def detach(self) -> None:
        """Close the connections, and forget the session's hooks."""
        self._hooks = None
        if self._mesh is not None:
            self._mesh.close()

    def _broke(self, reason: str) -> None:
        """Break Holdfast's connections and report a fault, because a collective of the framework itself broke."""
        if not self.poisoned:
            self._lines().poison(reason)
            self._lines().on_fault(reason)

    def _reseed(self, step: int) -> int:
        """Seed the generators of Python and NumPy for one step.

        Returns:
            The number from which a framework derives its own seed.
        """
        random.seed(self._mixed("python", step))
        np.random.seed(self._mixed("numpy", step) % 2**32)
        return self._mixed("framework", step)

    def _mixed(self, generator: str, step: int) -> int:
        stream = self.rank if self.streams is None else self.streams.number(generator, self.rank)
        return (self._seed * SEED_PRIME + stream) * SEED_PRIME + step

    def draw_from(self, streams: Streams | None) -> None:
        """Draw random numbers from the given streams from now on (``SharesRandomNumbers``)."""
        self.streams = streams

    def compare_generators(self) -> Streams:
        """Compare the random generators with those of the other ranks (``SharesRandomNumbers``). Raises: PeerLost."""
        states = {
            "python": random.getstate(),
            "numpy": np.random.get_state(legacy=False),
            "framework": self._framework_seed(),
        }
        digests = {kind: digest_of_state(state) for kind, state in states.items()}
        return compare_generators(digests, self.rank, self.world_size, self.vote, copies_known=False)

    def _framework_seed(self) -> object:
        """Return the seed that the script gave the framework; None if its generators are not seeded here."""
        return None

    def between(self, step: int, part: int, *, again: bool) -> None:
        """Seed Python and NumPy for the code that the script runs before a block.

        Unless ``again``, copy the user's state.
        """
        self._reseed(BETWEEN + step)
        if not again:
            self.remember(step)

    def remember(self, step: int, *, whole: bool = False) -> None:
        """Copy learning rates and the user's own state. The script may change them before the block of ``step``."""
        self.state.take_before(step)

    def vote(self, vector: list[int]) -> list[int]:
        """Return the sum of ``vector`` over all ranks. Raises: PeerLost."""
        return [int(n) for n in self.mesh.sum(np.array(vector, np.int64))]

    # ------------------------------------------------------------------ copies

    def begin_equal(self) -> None:
        """Check before the first step of a new job that the copies of the state are equal on all ranks.

        If the script asks for a broadcast, unequal copies are overwritten from the lowest rank that holds them.

        Raises:
            StateError: copies differ and the script does not ask for a broadcast; the error names the tensors.
            PeerLost: a rank is lost.
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
        """Return True if the script asks for a broadcast of the initial values."""
        return False

    def _remedy(self) -> str:
        """Return the hint for an error about different initial values."""
        return "give all ranks the same seed before they make the model"

    def compares(self, fqn: str) -> bool:
        """Return True if the tensor must be equal on all ranks that hold it: weights and optimizer state."""
        return self.state.trains(fqn)

    def digest(self, collected: Collected, parts: Sequence[Extent]) -> int:
        """Return one 64-bit digest of byte ranges of the state (``optional_abilities.ComparesCopies``)."""
        return digest_of(self._of_vote() or collected, parts)

    def _of_vote(self) -> Collected | None:
        """Return the state that the vote in progress compares between ranks; None if no vote is in progress."""
        return None

    def poison(self, reason: str) -> None:
        """Break every sum in progress.

        A hang in a collective of the framework itself continues. Only a kill of the process ends it.
        """
        if self._mesh is not None:
            self._mesh.poison(reason)

    def enter_update(self) -> None:
        """Do nothing: this adapter does not forbid collectives."""

    def end_rehearsal(self) -> None:
        """Do nothing: :meth:`reconfigure` ends the rehearsal of a newcomer."""
