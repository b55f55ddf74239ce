"""The optional abilities of an adapter, beside the protocols of ``adapter.py``: one protocol per ability.

A session tests with ``isinstance`` whether an adapter has an ability, and works without the ability otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any, ClassVar, NamedTuple, Protocol, runtime_checkable

from holdfast.frameworks.common.adapter import Collected, Feed
from holdfast.frameworks.common.random_streams import Streams
from holdfast.store.layouts.box import Extent
from holdfast.store.layouts.layout import Box
from holdfast.store.shared_memory.update_log import Update


@runtime_checkable
class CountsWrites(Protocol):
    """A :class:`Collected` that can detect at low cost whether its tensors were written."""

    def writes(self) -> tuple[int, ...]:
        """Return one number per tensor, in the order of the tensors. A number changes when its tensor is written."""


@runtime_checkable
class GivesPieces(Protocol):
    """A :class:`Collected` that copies from a device only the requested bytes."""

    def piece(self, fqn: str, box: Box, start: int, stop: int) -> memoryview:
        """Return bytes ``start`` to ``stop`` of one box of tensor ``fqn``, fewer if the box is shorter.

        Raises:
            StateError: this rank does not hold the box.
        """


@runtime_checkable
class StandsIn(Protocol):
    """An adapter that can be built before the rank of its process is known."""

    def become(self, rank: int) -> None:
        """Set the rank of this process, which had none so far."""


@runtime_checkable
class DrawsFromSeveral(Protocol):
    """An adapter that can draw a batch of each of several loaders in one step."""

    def feeds(self, loaders: Sequence[Any]) -> Sequence[Feed]:
        """Return the batches of each of the user's loaders as a feed."""


@runtime_checkable
class HasGroups(Protocol):
    """An adapter whose process groups exist before a session opens. Ranks without an agent can exchange data over them.

    Attributes:
        own_groups: the framework's process groups are objects of Holdfast.
    """

    own_groups: ClassVar[bool]


@runtime_checkable
class TakesParts(Protocol):
    """An adapter that can run a step as several blocks (parts). A rank can then also do the work of missing ranks."""

    def share(self, part: int, parts: int) -> None:
        """Prepare the next block, which is number ``part`` of the ``parts`` blocks of its step. The first number is 0.

        The previous block of the step has ended normally.
        """


@runtime_checkable
class CommunicatesInUpdates(Protocol):
    """An adapter with optimizers whose update uses collectives, so that the update is made before the vote.

    Attributes:
        tentative: names of these optimizers. :meth:`Adapter.record` is called before each of their updates.
    """

    tentative: frozenset[str]


@runtime_checkable
class RunsWithoutPeers(Protocol):
    """An adapter that can make the script's collectives complete on this rank's own data."""

    def set_aside(self, on: bool) -> None:
        """Complete the calling thread's collectives on local data (``on``), or with the peers again."""


@runtime_checkable
class Accumulates(Protocol):
    """An adapter for a library that itself accumulates gradients and counts the batches."""

    def expect(self, batches: int | None) -> None:
        """Set the number of batches of the next block; None means one batch, or as many as the block draws itself."""


@runtime_checkable
class ComparesCopies(Protocol):
    """An adapter whose ranks hold bit-identical copies of the same boxes."""

    @property
    def trains_alone(self) -> bool:
        """True if no block in this process has communicated with another rank so far."""

    def compares(self, fqn: str) -> bool:
        """Return False for a tensor whose copies may differ between ranks without an error."""

    def digest(self, collected: Collected, parts: Sequence[Extent]) -> int:
        """Return one 64-bit digest of the byte ranges ``parts`` of the state, in their order."""


@runtime_checkable
class BeginsEqual(Protocol):
    """An adapter that makes the initial states of the ranks of a new job equal, or proves that they are equal."""

    def begin_equal(self) -> None:
        """Make the copies of the initial state equal, or prove that they are equal, if the framework can do this.

        Raises:
            StateError: copies differ, and are not overwritten; the error names the tensor.
            PeerLost: a rank is gone.
        """


@runtime_checkable
class SharesRandomNumbers(Protocol):
    """An adapter that lets ranks draw the same random numbers if their generators were equal when the job began."""

    @property
    def streams(self) -> Streams | None:
        """The streams of random numbers of all copies of the model; None if each copy has separate streams."""

    def compare_generators(self) -> Streams:
        """Compare the random generators of this rank with those of the other ranks. All ranks call it.

        Raises: PeerLost.
        """

    def draw_from(self, streams: Streams | None) -> None:
        """Draw random numbers from the given streams from now on. This sets the attribute ``streams``."""


@runtime_checkable
class KnowsWeights(Protocol):
    """An adapter that can detect whether the script has put other weights into the model."""

    def holds_weights(self) -> bool:
        """Return whether the model still has the weights of the last boundary, judged by a sample of the weights.

        The boundary is the latest of these moments: a block ended, the script was given a step, or the script
        began or left a loop. Callable from any thread.
        """


class Updates(Protocol):
    """Access to the optimizers' updates, for the gradient log.

    An update is *foretold* when it is made in advance on a copy of the state.
    """

    def why_not(self) -> str:
        """Return why updates cannot be made again from a log; empty if no reason is known in advance."""

    def rebuilds(self, fqn: str) -> bool:
        """Return whether a tensor is a weight or optimizer state, so that only updates change it."""

    def settle(self) -> None:
        """Record the weights and the optimizer's state for :meth:`undisturbed`. Each update records them again."""

    def rest(self) -> None:
        """Stop recording weights and optimizer state until the next :meth:`settle`, to save time in updates."""

    def undisturbed(self) -> bool:
        """Return True if only updates were seen to write weights or optimizer state since :meth:`settle`.

        Callable from any thread.
        """

    def take(self, step: int) -> Update:
        """Return the data of the update of ``step`` before the update is made. The data are valid until the update.

        Raises:
            StateError: the data cannot be logged.
        """

    def foretell(self, update: Update) -> None:
        """Make ``update`` on a copy of the state, without peers, before the real update. Raises: StateError."""

    def as_foretold(self) -> str:
        """Return the name of the first tensor that differs between foretold and real update; empty if none differs."""

    def replay(self, updates: Sequence[Update]) -> None:
        """Make ``updates`` again without peers, from the state before the first of them. Raises: CheckpointInvalid."""


@runtime_checkable
class LogsUpdates(Protocol):
    """An adapter whose updates can be made again from a gradient log."""

    updates: Updates


class Gradients(Protocol):
    """Access to the gradients that the optimizers are about to use."""

    def may_drop(self) -> None:
        """Prepare for calls of :meth:`drop` in this session."""

    def begin_check(self, optimizer: str) -> Callable[[], str]:
        """Queue a check of the gradients on the device, without a wait.

        Args:
            optimizer: name of the optimizer that is about to step. Gradients of other optimizers may be checked as
                well.

        Returns:
            A function that waits for the check. It returns the first weight whose gradient on this rank holds inf or
            nan, or an empty text.
        """

    def weights_alone(self) -> int | None:
        """Return a number that grows with each write to a weight; None if a weight has a gradient.

        The update will write a weight with a gradient, so the number could not show a write by the script.
        """

    def drop(self) -> None:
        """Discard the gradients of this block, so that the optimizers that step in it change nothing."""


@runtime_checkable
class SeesGradients(Protocol):
    """An adapter that can read the gradients before an update."""

    gradients: Gradients


@runtime_checkable
class DescribesUpdates(Protocol):
    """An adapter that can describe the updates which a script is about to make."""

    def scheduled_settings(self, optimizer: str) -> dict[str, list[float]]:
        """Return the settings that schedules change: the numbers of all parameter groups, by the name of the setting.

        Numbers on a device are left out.

        Args:
            optimizer: name of an optimizer of the session.
        """

    def declares(self, value: object) -> bool:
        """Return whether the state of the session contains ``value``, a tensor or another object of the script."""

    def keeps(self, owner: object, attribute: str) -> bool:
        """Return whether the state of the session contains a plain attribute of ``owner``, an object of the script."""

    def objects(self) -> list[object]:
        """Return the objects in ``state=`` of which the session saves the ``state_dict()``."""

    def in_user_state(self, value: object) -> bool:
        """Return whether ``value`` is ``state=``, an entry of it, or lies in a container there.

        False for a part of a tensor of which the ranks hold different parts.
        """

    def batches_drawn(self, value: object) -> int | None:
        """Return the number of batches that ``value``, an iterator of a loader, has yielded; None for other objects."""

    def content_of(self, value: object, size_bytes_max: int) -> bytes | None:
        """Return the content of a tensor on the CPU.

        Return None if ``value`` is not such a tensor, or is larger than ``size_bytes_max``.
        """

    def digest_of(self, value: object) -> int | None:
        """Return a digest of the content of ``value``; tensors of the state do not count. Waits for the device.

        The digest is equal in all processes with equal contents.

        Return None if ``value`` is not a tensor, array, module or plain value, nor a container of them.
        """


@runtime_checkable
class CountsChanges(Protocol):
    """An adapter whose tensors count their changes in place."""

    def changes_of(self, value: object) -> int | None:
        """Return a number that grows with each change in place of a tensor or of its views; None for other objects."""


TRAINED = "the trained weight "


@runtime_checkable
class ProvesBlocks(Protocol):
    """An adapter that can run a block without peers and without effect, and digest the block's results."""

    @property
    def partial(self) -> bool:
        """True if this rank holds only a part of the model.

        A block without peers then has other results than one with peers.
        """

    def go_alone(self, *, first: bool, suspected: bool) -> bool:
        """Let the block that begins run without peers and without effect, until :meth:`Adapter.end_rehearsal`.

        Args:
            first: True if this process has not committed a block yet.
            suspected: True after two runs of the block differed. This run then uses deterministic algorithms, and
                records the values that the block uses.

        Returns:
            True if the run begins; False if such a run is not possible at this step.
        """

    def found(self) -> Mapping[str, int]:
        """Return digests of the state from which a block starts. A run without effect restores this state.

        The keys name parts of the state in words.
        """

    def trained(self) -> Mapping[str, int]:
        """Return digests of the trained weights, keyed by :data:`TRAINED` and the name of the weight."""

    def computed(self) -> Mapping[str, int]:
        """Return digests of the results of the block so far; empty without results. Keys name the results in words."""

    def cause(self) -> str:
        """Return the likely cause of the difference between two runs of a block, in words; empty if none was found."""

    def changed(self) -> Sequence[str]:
        """Return the numbers in attributes of the model that differed between the last two suspected runs.

        Each number is a text with both values.
        """


@runtime_checkable
class AgreesOnSums(Protocol):
    """An adapter in which the order of the sums over the ranks depends on the earlier blocks of a process."""

    def excuse(self) -> bool:
        """Make no further rehearsal for now, because an exception of the script has left this rehearsal.

        Returns:
            False if this process cannot train without a rehearsal.
        """

    def agree(self) -> None:
        """Make the order in which gradients are summed equal on all ranks, if it may differ.

        All ranks call this method before a block with peers.

        Raises:
            PeerLost: a rank is lost.
        """


class Finder(Protocol):
    """A finder of undeclared state: values that the script changes and has not given to the session.

    Attributes:
        counters: names of undeclared counters that have changed between the last two calls of :meth:`changed`. Such a
            counter is an attribute of an object that also holds state of the session.
    """

    counters: Sequence[str]

    def changed(self, variables: Mapping[str, object], renewed: Set[str] = frozenset()) -> Sequence[str]:
        """Return the names of undeclared values that have changed since the previous call.

        Args:
            variables: the script's variables by name.
            renewed: variables and attributes of the script whose container each step replaces by a new one, computed
                from the old one. Other containers that are replaced hold only temporary values.
        """

    def require_savable(self) -> None:
        """Raise StateError if the session's state holds a value that cannot be saved."""

    def moved(self) -> Sequence[str]:
        """Return descriptions of undeclared schedules that have moved since a call of :meth:`changed`. It is cheap."""


@runtime_checkable
class FindsGenerators(Protocol):
    """An adapter that can find the random generators of a script."""

    def generators(self, variables: Mapping[str, object]) -> Mapping[str, object]:
        """Return each random generator that the session neither has nor seeds, by its name in the script.

        Args:
            variables: the script's variables by name. Generators inside of their objects are also found.
        """

    def state_of_generator(self, generator: object) -> int:
        """Return a digest of the present state of a generator that :meth:`generators` has returned."""


@runtime_checkable
class FindsUndeclaredState(Protocol):
    """An adapter that can find values that the script changes and has not given to the session."""

    def finder(self) -> Finder:
        """Return a new finder of undeclared state."""


class ForeignBlocks(Protocol):
    """The blocks of other data-parallel copies of the model, run in this process without peers.

    Attributes:
        copy: number of the copy that this process trains and holds as a whole.
        numbers: number of copies in the job.
    """

    copy: int
    numbers: int

    def feed(self, loader: Any, copy: int, number: int = 0) -> Feed | None:
        """Return the batches that copy number ``copy`` draws from the same loader; None if they are not known.

        ``number`` is the index of the loader among the loaders of its loop.
        """

    def act_as(self, copy: int, step: int) -> None:
        """Seed the next block as a block of copy number ``copy`` would be seeded at ``step``."""

    def gradients(self) -> int | None:
        """Return the 64-bit digest of the gradients of the block; None if the block has left no gradients."""

    def sum(self, vector: Sequence[int]) -> list[int]:
        """Return the sum of an integer vector over all ranks. Raises: PeerLost."""


@runtime_checkable
class StandsForOthers(Protocol):
    """An adapter whose ranks hold whole copies of the model, and can run the block of another rank's copy."""

    @property
    def others(self) -> ForeignBlocks | None:
        """Access to the blocks of other copies; None if each rank holds only a part of a copy."""


@runtime_checkable
class MarksTensors(Protocol):
    """An adapter that can detect whether a block has written into a tensor of its batch."""

    def mark(self, item: Any) -> object:
        """Return a mark of tensor ``item``. A later mark differs from it if the tensor was written in between.

        Return None if ``item`` is not a tensor.
        """

    def duplicate(self, tensor: Any) -> Any:
        """Return a copy of a tensor that shares no memory with the original."""

    def share_memory(self, item: Any, tensor: Any) -> bool:
        """Return whether a write into ``item`` or ``tensor`` may change the other one."""


class Copy(NamedTuple):
    """The data-parallel copy of the model that a rank trains.

    ``number`` counts from 0 to ``numbers`` - 1. It is equal on all ranks that hold parts of this copy.
    """

    number: int
    numbers: int


@runtime_checkable
class DigestsBatches(Protocol):
    """An adapter that can compute digests of batches, by which batches are compared.

    Attributes:
        copy: the copy of the model that this rank trains. Ranks of other copies have other data.
    """

    copy: Copy

    def digest_batch(self, batch: Any) -> int:
        """Return a 64-bit digest of a batch. Equal batches have equal digests in all processes.

        The digest is 0 if the content of the batch is not known.
        """


@runtime_checkable
class PinsMemory(Protocol):
    """An adapter whose device copies faster into registered (pinned) host memory."""

    def pin(self, memory: memoryview) -> Callable[[], None]:
        """Register ``memory`` with the device. Return a function that unregisters it."""
