"""The optional abilities of an adapter, beside the protocols of ``adapter.py``: one protocol each.

A session tests for an ability by ``isinstance`` where the ability is used, and works without it otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, Protocol, runtime_checkable

from holdfast.frameworks.common.adapter import Collected, Feed
from holdfast.store.layouts.box import Extent
from holdfast.store.layouts.layout import Box
from holdfast.store.shared_memory.update_log import Update


@runtime_checkable
class CountsWrites(Protocol):
    """A :class:`Collected` that can tell at low cost whether its tensors were written."""

    def writes(self) -> tuple[int, ...]:
        """Return one number per tensor, in their order. A number changes when its tensor is written."""


@runtime_checkable
class GivesPieces(Protocol):
    """A :class:`Collected` that copies from a device only the bytes that are asked for."""

    def piece(self, fqn: str, box: Box, start: int, stop: int) -> memoryview:
        """Return bytes ``start`` to ``stop`` of one box of this rank, fewer if the box is shorter.

        Raises: StateError.
        """


@runtime_checkable
class StandsIn(Protocol):
    """An adapter that can be built before the rank of its process is known."""

    def become(self, rank: int) -> None:
        """Set the rank of this process, which had none so far."""


@runtime_checkable
class HasGroups(Protocol):
    """An adapter whose process groups exist before a session opens, so that a vote needs no agent.

    Attributes:
        own_groups: the groups are objects of Holdfast under the names of the framework.
    """

    own_groups: ClassVar[bool]


@runtime_checkable
class TakesParts(Protocol):
    """An adapter that can run a step as several blocks (parts), to do the work of missing ranks as well."""

    def share(self, part: int, parts: int) -> None:
        """Prepare the next block, which is number ``part`` of the ``parts`` blocks of its step.

        The previous block of the step has ended normally.
        """


@runtime_checkable
class CommunicatesInUpdates(Protocol):
    """An adapter with optimizers whose update communicates, so that the update is made before the vote.

    Attributes:
        tentative: names of these optimizers; :meth:`Adapter.record` is called before each of their updates.
    """

    tentative: frozenset[str]


@runtime_checkable
class RunsWithoutPeers(Protocol):
    """An adapter that can make the script's collectives complete on local data."""

    def set_aside(self, on: bool) -> None:
        """Complete collectives on local data from now on, or with the peers again."""


@runtime_checkable
class Accumulates(Protocol):
    """An adapter for a library that accumulates gradients and counts the batches itself."""

    def expect(self, batches: int | None) -> None:
        """Set the number of batches of the next block; None: one, or the number that the block draws itself."""


@runtime_checkable
class ComparesCopies(Protocol):
    """An adapter whose ranks hold bit-identical copies of the boxes that they have in common."""

    @property
    def trains_alone(self) -> bool:
        """True if no block of this process has communicated with another rank."""

    def compares(self, fqn: str) -> bool:
        """Return False for a tensor that may differ, without an error, between ranks that hold the same box."""

    def digest(self, collected: Collected, parts: Sequence[Extent]) -> int:
        """Return the 64-bit digest of the given pieces of the state, in this order."""


@runtime_checkable
class BeginsEqual(Protocol):
    """An adapter that makes or proves the initial states of the ranks of a new job equal."""

    def begin_equal(self) -> None:
        """Return when the copies of the state that the framework can compare or send are equal on all ranks.

        Raises:
            StateError: copies differ, and are not overwritten; the error names the tensor.
            PeerLost: a rank is gone.
        """


@runtime_checkable
class KnowsWeights(Protocol):
    """An adapter that sees whether the script has put other weights into the model."""

    def holds_weights(self) -> bool:
        """Return whether the model has the weights of the last known moment, judged by a sample of them.

        That moment is the end of the last block or, if later, the time when the script was given its step or began or
        left a loop. Callable from any thread.
        """


class Updates(Protocol):
    """The updates of the optimizers, as a log needs them.

    An update is *foretold* when it is made in advance on a copy of the state.
    """

    def why_not(self) -> str:
        """Return why updates cannot be made again from a log; empty: no reason is known in advance."""

    def rebuilds(self, fqn: str) -> bool:
        """Return whether a tensor is a weight or state of the optimizer, so that only updates change it."""

    def settle(self) -> None:
        """Record the present state as the start of the next update, and again after each update."""

    def rest(self) -> None:
        """Stop recording until the next :meth:`settle`: no log needs it, and it takes time at each update."""

    def undisturbed(self) -> bool:
        """Return whether only updates were seen to write weights or state of the optimizer since :meth:`settle`.

        Callable from any thread.
        """

    def take(self, step: int) -> Update:
        """Return the update of ``step`` before it is made. Its bytes are valid until it is made. Raises: StateError."""

    def foretell(self, update: Update) -> None:
        """Foretell the next update: make ``update`` on a copy of the state, without peers. Raises: StateError."""

    def as_foretold(self) -> str:
        """Return the name of the first tensor that differs from the foretold update; empty: none differs."""

    def replay(self, updates: Sequence[Update]) -> None:
        """Make updates again without peers, from the state before the first of them. Raises: CheckpointInvalid."""


@runtime_checkable
class LogsUpdates(Protocol):
    """An adapter whose updates can be made again from a log."""

    updates: Updates


class Gradients(Protocol):
    """The gradients that the optimizers are about to use."""

    def may_drop(self) -> None:
        """Prepare for updates that :meth:`drop` leaves out in this session."""

    def nonfinite(self, optimizer: str) -> str:
        """Return the first weight whose gradient holds inf or nan on this rank; empty: none. Wait for the device.

        Args:
            optimizer: name of the optimizer that is about to step; gradients of others may be checked as well.
        """

    def weights_alone(self) -> int | None:
        """Return a number that grows with each write to a weight; None: a weight has a gradient and so will change."""

    def drop(self) -> None:
        """Leave out the update of this block: the optimizers that step in it change nothing."""


@runtime_checkable
class SeesGradients(Protocol):
    """An adapter that can read gradients before an update."""

    gradients: Gradients


@runtime_checkable
class ProvesBlocks(Protocol):
    """An adapter that can run a block without peers and without effect, and digest its results."""

    @property
    def partial(self) -> bool:
        """True if this rank holds only a part of the model, so that a block without peers has other results."""

    def go_alone(self, *, first: bool, suspected: bool) -> bool:
        """Let the block that begins run without peers and effect. :meth:`Adapter.end_rehearsal` ends the run.

        Args:
            first: True if this process has not committed a block yet.
            suspected: True after two runs of the block differed. This run then uses deterministic algorithms, and
                records the values that the block uses.

        Returns:
            True if the run begins; False if such a run is not possible at this step.
        """

    def found(self) -> Mapping[str, int]:
        """Return digests of the state at the start of a block, which a run without effect restores; keys in words."""

    def computed(self) -> Mapping[str, int]:
        """Return digests of the results of the block so far, with keys in words; empty: there are no results."""

    def cause(self) -> str:
        """Return a text that names a value that a suspected run used and the run before it had made; empty: none."""


class Finder(Protocol):
    """A finder of values of the script that change and are not part of the session."""

    def changed(self, variables: Mapping[str, object]) -> Sequence[str]:
        """Return the names of such values that have changed since the call before.

        Args:
            variables: the script's variables by name.
        """


@runtime_checkable
class FindsUndeclaredState(Protocol):
    """An adapter that can find values of the script that change and are not part of the session."""

    def finder(self) -> Finder:
        """Return a new finder."""


class ForeignBlocks(Protocol):
    """The blocks of other copies of the model, run in this process without peers.

    Attributes:
        copy: number of the copy that this process trains and holds as a whole.
        numbers: number of copies in the job.
    """

    copy: int
    numbers: int

    def feed(self, loader: Any, copy: int) -> Feed | None:
        """Return the batches that another copy draws from the same loader; None: they are not known."""

    def act_as(self, copy: int, step: int) -> None:
        """Seed the block that begins as copy ``copy`` of the model would seed it at ``step``."""

    def gradients(self) -> int | None:
        """Return the 64-bit digest of the gradients of the block; None: there are none."""

    def sum(self, vector: Sequence[int]) -> list[int]:
        """Return the sum of a vector over all ranks. Raises: PeerLost."""


@runtime_checkable
class StandsForOthers(Protocol):
    """An adapter whose ranks hold whole copies of the model, and can run a block of another copy."""

    @property
    def others(self) -> ForeignBlocks | None:
        """The blocks of other copies; None: each rank holds only a part of a copy."""


@runtime_checkable
class MarksTensors(Protocol):
    """An adapter that can detect whether a block has written into a tensor of its batch."""

    def mark(self, item: Any) -> object:
        """Return a mark of a tensor that changes when the tensor is written; None: ``item`` is no tensor."""

    def duplicate(self, tensor: Any) -> Any:
        """Return a copy of a tensor that shares no memory with the original."""

    def share_memory(self, item: Any, tensor: Any) -> bool:
        """Return whether a write into one of the two may change the other."""


class Copy(NamedTuple):
    """One copy of the model. ``number`` is below ``numbers``, and equal on all ranks that hold parts of this copy."""

    number: int
    numbers: int


@runtime_checkable
class DigestsBatches(Protocol):
    """An adapter that can compare batches by digest.

    Attributes:
        copy: the copy of the model that this rank trains. Ranks of other copies have other data.
    """

    copy: Copy

    def digest_batch(self, batch: Any) -> int:
        """Return a 64-bit digest, equal in every process for the same batch."""


@runtime_checkable
class PinsMemory(Protocol):
    """An adapter whose device copies faster into registered (pinned) memory."""

    def pin(self, memory: memoryview) -> Callable[[], None]:
        """Register ``memory`` with the device. Return a function that unregisters it."""
