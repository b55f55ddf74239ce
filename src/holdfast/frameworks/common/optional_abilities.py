"""What a framework may be able to do beside ``adapter.py``: one protocol each, found by ``isinstance``.

A session asks for an ability where it uses it, and does without it elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, Protocol, runtime_checkable

from holdfast.frameworks.common.adapter import Collected, Feed
from holdfast.store.layouts.layout import Box
from holdfast.store.layouts.replica_digests import Extent
from holdfast.store.shared_memory.update_log import Update


@runtime_checkable
class CountsWrites(Protocol):
    """What a :class:`Collected` may also be: one that tells cheaply whether its tensors were written."""

    def writes(self) -> tuple[int, ...]:
        """Other numbers when a tensor was written since, in the order of the tensors."""


@runtime_checkable
class GivesPieces(Protocol):
    """What a :class:`Collected` may also be: one that copies from a device, and no more than is asked for."""

    def piece(self, fqn: str, box: Box, start: int, stop: int) -> memoryview:
        """Bytes ``start`` to ``stop`` of one box of this rank, fewer where it ends before. Raises: StateError."""


@runtime_checkable
class StandsIn(Protocol):
    """What an adapter may also be: one that can be built before the rank of its process is known."""

    def become(self, rank: int) -> None:
        """The process is this rank from now on."""


@runtime_checkable
class HasGroups(Protocol):
    """What an adapter may also be: one over process groups that are made before a session opens: a vote needs no agent.

    Attributes:
        own_groups: they are Holdfast's, behind the names of the framework.
    """

    own_groups: ClassVar[bool]


@runtime_checkable
class TakesParts(Protocol):
    """What an adapter may also be: one that can run a step in parts, for ranks that are missing."""

    def share(self, part: int, parts: int) -> None:
        """The block that begins next is part ``part`` of ``parts`` of its step; the part before has ended in order."""


@runtime_checkable
class CommunicatesInUpdates(Protocol):
    """What an adapter may also be: one with optimizers whose update communicates, so that it comes before the vote.

    Attributes:
        tentative: their names; :meth:`Adapter.record` is called before each of their updates.
    """

    tentative: frozenset[str]


@runtime_checkable
class Accumulates(Protocol):
    """What an adapter may also be: one that knows a library which accumulates gradients by a count of its own."""

    def expect(self, batches: int | None) -> None:
        """The next block has so many batches of the loader; None: one, or what it draws itself."""


@runtime_checkable
class ComparesCopies(Protocol):
    """What an adapter may also be: one whose ranks hold bit-identical copies of what they hold in common."""

    @property
    def trains_alone(self) -> bool:
        """No block of this process has communicated with another rank."""

    def compares(self, fqn: str) -> bool:
        """False for a tensor that may lawfully differ between ranks that hold the same box."""

    def digest(self, collected: Collected, parts: Sequence[Extent]) -> int:
        """64-bit digest of parts of the state, in this order."""


@runtime_checkable
class BeginsEqual(Protocol):
    """What an adapter may also be: one that compares what the ranks of a fresh job begin with."""

    def begin_equal(self) -> None:
        """The copies of the state are the same on all ranks from here on.

        Raises:
            StateError: they are not; by name.
            PeerLost: a rank is gone.
        """


@runtime_checkable
class KnowsWeights(Protocol):
    """What an adapter may also be: one that sees whether the script has put other weights into the model."""

    def holds_weights(self) -> bool:
        """Those are there that were when the last block ended, or when the script was given its step or began or left
        a loop since; as far as a sample of them shows. From any thread."""


class Updates(Protocol):
    """The updates of an optimizer, for a log of them."""

    def why_not(self) -> str:
        """Why they cannot be made again; empty: they can, as far as that is seen beforehand."""

    def rebuilds(self, fqn: str) -> bool:
        """This tensor is a weight, or state of the optimizer: updates alone change it."""

    def settle(self) -> None:
        """What is there now is what the next update begins with."""

    def undisturbed(self) -> bool:
        """Nothing was seen to write weights or state of the optimizer since, but its update. From any thread."""

    def take(self, step: int) -> Update:
        """The update of ``step`` that is about to be made; its bytes are valid until then. Raises: StateError."""

    def foretell(self, update: Update) -> None:
        """Make the update of now on a copy of the state, alone. Raises: StateError."""

    def as_foretold(self) -> str:
        """The first tensor that is not what was foretold; empty: all are."""

    def replay(self, updates: Sequence[Update]) -> None:
        """Make these updates again, on the state of before the first one, alone. Raises: CheckpointInvalid."""


@runtime_checkable
class LogsUpdates(Protocol):
    """What an adapter may also be: one whose updates can be made again from a log."""

    updates: Updates


class Gradients(Protocol):
    """The gradients that optimizers are about to use."""

    def may_drop(self) -> None:
        """:meth:`drop` may be called in this session."""

    def nonfinite(self, optimizer: str) -> str:
        """The first weight whose gradient holds inf or nan on this rank; empty: none. Waits for the device.

        Args:
            optimizer: the one that is about to step; others of the session may be looked at with it.
        """

    def weights_alone(self) -> int | None:
        """A number that grows with each write to a weight; None: a weight has a gradient, which will change it."""

    def drop(self) -> None:
        """The optimizers that step in this block change nothing."""


@runtime_checkable
class SeesGradients(Protocol):
    """What an adapter may also be: one that can look at gradients before an update."""

    gradients: Gradients


@runtime_checkable
class ProvesBlocks(Protocol):
    """What an adapter may also be: one that can run a block alone and without effect, and say what came out of it."""

    @property
    def partial(self) -> bool:
        """This rank alone has no whole copy of the model: alone it computes with other numbers."""

    def go_alone(self, *, first: bool, suspected: bool) -> bool:
        """The block that begins is such a run. :meth:`Adapter.end_rehearsal` ends it.

        Args:
            first: no block of this process has counted.
            suspected: two runs differed: algorithms are deterministic in this one, and what it uses is noted.

        Returns:
            False: not possible at this step.
        """

    def found(self) -> Mapping[str, int]:
        """Digests of what a block finds and a run without effect has put back, by what they are of."""

    def computed(self) -> Mapping[str, int]:
        """Digests of what the block has computed until now, by what they are of; empty: nothing."""

    def cause(self) -> str:
        """What a suspected run used that was made in the one before it, in words, or empty."""


class ForeignBlocks(Protocol):
    """Blocks of other copies of the model, run in this process without peers.

    Attributes:
        copy: the one that this process trains; it holds all of it.
        numbers: copies in the job.
    """

    copy: int
    numbers: int

    def feed(self, loader: Any, copy: int) -> Feed | None:
        """The batches that another copy draws from the same loader; None: that is not known."""

    def act_as(self, copy: int, step: int) -> None:
        """The block that begins has the random numbers of another copy."""

    def gradients(self) -> int | None:
        """64-bit digest of what the block has computed; None: nothing."""

    def sum(self, vector: Sequence[int]) -> list[int]:
        """Over all ranks. Raises: PeerLost."""


@runtime_checkable
class StandsForOthers(Protocol):
    """What an adapter may also be: one whose ranks hold whole copies, and that runs a block of another one of them."""

    @property
    def others(self) -> ForeignBlocks | None:
        """None: each rank holds only a part of a copy."""


@runtime_checkable
class MarksTensors(Protocol):
    """What an adapter may also be: one that sees whether a block has written into a tensor of its batch."""

    def mark(self, item: Any) -> object:
        """Equal to an earlier mark as long as nothing was written; None: ``item`` is no tensor."""

    def duplicate(self, tensor: Any) -> Any:
        """A copy that shares no memory with it."""

    def share_memory(self, item: Any, tensor: Any) -> bool:
        """What is written into one of them may be seen in the other."""


class Copy(NamedTuple):
    """One copy of the model: ``number`` is equal on the ranks that hold parts of it, and below ``numbers``."""

    number: int
    numbers: int


@runtime_checkable
class DigestsBatches(Protocol):
    """What an adapter may also be: one that tells whether two batches are the same.

    Attributes:
        copy: the one that this rank trains. Ranks with another one have data of their own.
    """

    copy: Copy

    def digest_batch(self, batch: Any) -> int:
        """64-bit digest, the same in every process that draws the same."""


@runtime_checkable
class PinsMemory(Protocol):
    """What an adapter may also be: one whose device copies faster into memory that it knows."""

    def pin(self, memory: memoryview) -> Callable[[], None]:
        """Make ``memory`` known; returns what undoes it."""
