"""What a session needs from a framework. One package beside this file per framework implements it.

The session owns the protocol (when to vote, what to save, whom to believe); an adapter owns the framework's objects:
how to copy state, how to break collectives, where the optimizer can be hooked.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, Protocol, runtime_checkable

from holdfast.core.ids import Generation
from holdfast.errors import GroupError
from holdfast.frameworks.common.state_tree import Plain
from holdfast.store.layouts.layout import Box, Catalogue, RankLayout, TensorMeta
from holdfast.store.layouts.replica_digests import Extent
from holdfast.store.shared_memory.update_log import Update
from holdfast.text import plural


class Aborted(BaseException):
    """Leaves the block of a step that will run again. ``with step`` swallows it.

    Not an ``Exception``: user code that catches broadly must not take it for its own.
    """


class Unsevered(GroupError):
    """This process still hangs in a broken collective, and nothing ends that: another process must take its place."""


class Collected(Protocol):
    """The training state at one moment; a ``TensorSource`` of the store."""

    values: dict[str, Plain]

    def view(self, fqn: str, box: Box) -> memoryview:
        """C-contiguous bytes of one box of this rank."""

    def layout(self, rank: int, world_size: int) -> RankLayout:
        """The boxes that this rank holds."""


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


class Restore(Protocol):
    """A load under way."""

    def buffers(self) -> list[tuple[TensorMeta, memoryview]]:
        """Every box to fill, with its writable bytes."""

    def finish(self) -> None:
        """The boxes are filled and verified: put everything into place."""


class DataIdentity(NamedTuple):
    """What is known of a dataset: ``content`` is a digest, or empty; ``shared``: every rank must have the same."""

    length: int
    content: str
    shared: bool

    def differs(self, other: DataIdentity) -> str:
        """In words, or empty."""
        if self.length != other.length:
            return f"{plural(self.length, 'sample')}, not {other.length}"
        if self.content and other.content and self.content != other.content:
            return f"as many samples ({self.length}), but other ones"
        return ""


class Feed(Protocol):
    """Batches, epoch after epoch."""

    epoch: int
    last_in_epoch: bool
    repeatable: bool  # a batch that is drawn in vain changes nothing: the next one is drawn from any place all the same
    rewinds: bool  # the loop that draws from it can be told to go back to an earlier place

    def place(self) -> Mapping[str, int]:
        """The position after the last batch drawn."""

    def seek(self, place: Mapping[str, int], local: Plain = None) -> None:
        """Go to a position; ``local`` is what :meth:`local_state` said there."""

    def local_state(self) -> Plain:
        """The part of the position that only this rank knows, or None."""

    def identity(self) -> DataIdentity | None:
        """Which data it draws from, when that can be told."""

    def draw(self, epochs: int | None = None) -> Any:
        """The next batch. Raises StopIteration after ``epochs`` epochs."""

    def close(self) -> None:
        """Stop loader workers."""


class Hooks(NamedTuple):
    """Calls into the session from inside user code, in the main thread."""

    backward: Callable[[], None]  # the first gradient of a step is being computed
    update: Callable[[str], None]  # the named optimizer is about to change weights
    updated: Callable[[str], None]  # it has
    waited: Callable[[int, int], None] = lambda since_ns, until_ns: None  # for peers, CLOCK_MONOTONIC
    compiling: Callable[[bool], None] = lambda on: None  # the framework compiles user code now, or no longer


class Adapter(Protocol):
    """One framework, for one session. Methods raise what their implementation documents."""

    rank: int
    world_size: int
    live: bool  # collectives can be rebuilt in place, and a newcomer can be built without peers
    scaled: bool  # a gradient scaler is in use: a block without an update had gradients with inf or nan

    @property
    def poisoned(self) -> bool:
        """A collective of this process broke, or :meth:`poison` was called."""

    @property
    def reason(self) -> str:
        """Why it is poisoned."""

    def attach(
        self, hooks: Hooks, on_fault: Callable[[str], None], on_collective: Callable[[int, str], None]
    ) -> None:
        """Install hooks.

        ``on_fault`` hears of the first broken collective, ``on_collective`` of each that starts: how many, and what.
        """

    def detach(self) -> None:
        """Remove what :meth:`attach` installed."""

    def is_fault(self, error: BaseException) -> bool:
        """``error``, raised in a session, is the framework's way to say that a peer is lost."""

    # ---- state
    def collect(self, *, frozen: bool = False, before: int = -1) -> Collected:
        """The state now, or (``frozen``) at the start of the current step. Callable from any thread.

        Args:
            before: learning rates, schedules and the user's own state as they were when the script was first given this
                step, or when the loop before it was over, where that is known.
        """

    def state_size(self) -> int:
        """A number that changes when the layout does."""

    def restore(self, catalogue: Catalogue, values: Mapping[str, Plain]) -> Restore:
        """Prepare a load."""

    def feed(self, loader: Any) -> Feed:
        """Batches of the user's loader."""

    # ---- step
    def between(self, step: int, part: int, *, again: bool) -> None:
        """Seed the generators for what the script draws before it enters the block of this step.

        Unless ``again``, what it does there may change learning rates and the user's own state.
        """

    def remember(self, step: int, *, whole: bool = False) -> None:
        """A loop is over, or begins: what the script does from now on, before ``step``, may change the same.

        Args:
            whole: or any of its own state, also what would cost too much to copy at each step (averages of weights).
        """

    def begin(self, step: int) -> None:
        """Seed the generators and copy what forward changes."""

    def shield(self) -> None:
        """The block begins: broken collectives complete from now on, instead of raising."""

    def record(self, name: str) -> None:
        """The named optimizer makes a tentative update: copy what it changes."""

    def prepare_vote(self) -> None:
        """Wait for the device and make what all ranks must share equal."""

    def vote(self, vector: list[int]) -> list[int]:
        """Sum int64 ``vector`` over all ranks. Raises: PeerLost."""

    def enter_update(self) -> None:
        """The vote has passed: no collective may start before :meth:`end`."""

    def end(self) -> None:
        """The block has ended, committed."""

    def release(self) -> None:
        """The block was left by the user's own exception: collectives are as outside of a step."""

    def abort(self) -> None:
        """Undo everything that the aborted step did; the next :meth:`begin` finds the state as it was."""

    # ---- groups
    def poison(self, reason: str) -> None:
        """Break all collectives of this process. From any thread, returns at once."""

    def reconfigure(self, generation: Generation) -> None:
        """Rebuild all groups. Raises: GroupError."""

    def rehearse(self) -> bool:
        """True when the next step must run once without effect; collectives then complete on own data."""

    def end_rehearsal(self) -> None:
        """Collectives communicate again."""


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
