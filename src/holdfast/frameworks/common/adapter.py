"""What a session needs from a framework: three protocols, for its state, its step and its groups.

One package beside this file per framework implements them; ``docs/new-framework.md`` shows how, with an example.

The session owns the protocol (when to vote, what to save, whom to believe); an adapter owns the framework's objects:
how to copy state, how to break collectives, where the optimizer can be hooked.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

from holdfast.core.ids import Generation
from holdfast.errors import GroupError
from holdfast.frameworks.common.state_tree import Plain
from holdfast.store.layouts.layout import Box, Catalogue, RankLayout, TensorMeta
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
        """The position after the last batch drawn.

        Returns: ``epoch``, ``batch`` (of this rank, drawn in the epoch), and what else :meth:`seek` needs.
        """

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


class StateAdapter(Protocol):
    """The training state of this rank: how to copy it, load it, and draw its batches.

    Attributes:
        rank, world_size: the place of this process.
    """

    rank: int
    world_size: int

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

    def between(self, step: int, part: int, *, again: bool) -> None:
        """Seed the generators for what the script draws before it enters the block of this step.

        Unless ``again``, what it does there may change learning rates and the user's own state.
        """

    def remember(self, step: int, *, whole: bool = False) -> None:
        """A loop is over, or begins: what the script does from now on, before ``step``, may change the same.

        Args:
            whole: or any of its own state, also what would cost too much to copy at each step (averages of weights).
        """


class StepAdapter(Protocol):
    """One step: what is copied before the block, and put back when it is aborted.

    Attributes:
        scaled: a gradient scaler is in use. A block without an update had gradients with inf or nan.
    """

    scaled: bool

    def begin(self, step: int) -> None:
        """Seed the generators and copy what forward changes."""

    def shield(self) -> None:
        """The block begins: broken collectives complete from now on, instead of raising."""

    def record(self, name: str) -> None:
        """The named optimizer makes a tentative update: copy what it changes."""

    def prepare_vote(self) -> None:
        """Wait for the device and make what all ranks must share equal."""

    def enter_update(self) -> None:
        """The vote has passed: no collective may start before :meth:`end`."""

    def end(self) -> None:
        """The block has ended, committed."""

    def release(self) -> None:
        """The block was left by the user's own exception: collectives are as outside of a step."""

    def abort(self) -> None:
        """Undo everything that the aborted step did; the next :meth:`begin` finds the state as it was."""


class GroupAdapter(Protocol):
    """The collectives of this rank: how to vote, break them and build them again.

    Attributes:
        rank, world_size: the place of this process.
        live: collectives can be rebuilt in place, and a replacement can be built without peers.
    """

    rank: int
    world_size: int
    live: bool

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

    def vote(self, vector: list[int]) -> list[int]:
        """Sum int64 ``vector`` over all ranks. Raises: PeerLost."""

    def poison(self, reason: str) -> None:
        """Break all collectives of this process. From any thread, returns at once."""

    def reconfigure(self, generation: Generation) -> None:
        """Rebuild all groups. Raises: GroupError."""

    def rehearse(self) -> bool:
        """True when the next step must run once without effect; collectives then complete on own data."""

    def end_rehearsal(self) -> None:
        """Collectives communicate again."""


class Adapter(StateAdapter, StepAdapter, GroupAdapter, Protocol):
    """One framework, for one session. Methods raise what their implementation documents.

    What a framework may be able to do beside this is in ``optional_abilities.py``: one protocol each.
    """
