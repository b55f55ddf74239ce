"""The interface between a session and a framework: three protocols, for its state, its step and its groups.

Each framework has a package beside this directory that implements them. ``docs/new-framework.md`` shows an example.

The session decides when to vote, what to save and which rank has the right state. An adapter handles the objects of the
framework: it copies state, breaks collectives and hooks the optimizer.
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
    """The exception that leaves the block of a step that will run again. ``with step`` swallows it.

    It is not an ``Exception``, so that ``except Exception`` in user code does not catch it.
    """


class Unsevered(GroupError):
    """The error of a process that hangs in a broken collective for good, so that another process must replace it."""


class Collected(Protocol):
    """The training state at one moment; a ``TensorSource`` of the store."""

    values: dict[str, Plain]

    def view(self, fqn: str, box: Box) -> memoryview:
        """Return the C-contiguous bytes of one box of this rank."""

    def layout(self, rank: int, world_size: int) -> RankLayout:
        """Return the boxes that this rank holds."""


class Restore(Protocol):
    """A load of the state in progress."""

    def buffers(self) -> list[tuple[TensorMeta, memoryview]]:
        """Return every box to fill, with its writable bytes."""

    def finish(self) -> None:
        """Put the values of all boxes, which are now filled and verified, into the framework's objects."""


class DataIdentity(NamedTuple):
    """The identity of a dataset.

    Attributes:
        length: number of samples.
        content: digest of the data; empty: not known.
        shared: every rank must have the same dataset.
    """

    length: int
    content: str
    shared: bool

    def differs(self, other: DataIdentity) -> str:
        """Return the difference to another dataset in words; empty: none is seen."""
        if self.length != other.length:
            return f"{plural(self.length, 'sample')}, not {other.length}"
        if self.content and other.content and self.content != other.content:
            return f"as many samples ({self.length}), but other ones"
        return ""


class Feed(Protocol):
    """The batches of a loader, epoch after epoch, with a position."""

    epoch: int
    last_in_epoch: bool
    # A batch that is drawn and not used changes nothing: the feed can still go to any place.
    repeatable: bool
    rewinds: bool  # the loop that draws from this feed can go back to an earlier place

    def place(self) -> Mapping[str, int]:
        """Return the position after the last batch drawn.

        Returns: ``epoch``, ``batch`` (number of batches that this rank has drawn in the epoch), and all other values
            that :meth:`seek` needs.
        """

    def seek(self, place: Mapping[str, int], local: Plain = None) -> None:
        """Go to a position; ``local`` is the result of :meth:`local_state` at that position."""

    def local_state(self) -> Plain:
        """Return the part of the position that only this rank knows, or None."""

    def identity(self) -> DataIdentity | None:
        """Return the identity of the dataset that this feed draws from; None if it is not known."""

    def draw(self, epochs: int | None = None) -> Any:
        """Return the next batch. Raises: StopIteration after ``epochs`` epochs."""

    def close(self) -> None:
        """Stop the worker processes of the loader."""


class Hooks(NamedTuple):
    """Calls into the session from inside user code, in the main thread."""

    backward: Callable[[], None]  # the first gradient of a step is being computed
    update: Callable[[str], None]  # the named optimizer is about to change weights
    updated: Callable[[str], None]  # the named optimizer has changed weights
    waited: Callable[[int, int], None] = lambda since_ns, until_ns: None  # a wait for peers; CLOCK_MONOTONIC
    compiling: Callable[[bool], None] = lambda on: None  # the compilation of user code begins (True) or ends


class StateAdapter(Protocol):
    """The training state of this rank: how to copy it, load it, and draw its batches.

    Attributes:
        rank, world_size: the place of this process.
    """

    rank: int
    world_size: int

    def collect(self, *, frozen: bool = False, before: int = -1) -> Collected:
        """Return the state now, or (``frozen``) at the start of the current step. Callable from any thread.

        Args:
            before: a step. Learning rates, schedules and the user's own state are then those from before the code that
                the script runs ahead of this step, if they were copied (see :meth:`between`, :meth:`remember`).
        """

    def state_size(self) -> int:
        """Return a number that changes when the layout changes."""

    def restore(self, catalogue: Catalogue, values: Mapping[str, Plain]) -> Restore:
        """Prepare and return a load of the state."""

    def feed(self, loader: Any) -> Feed:
        """Return the batches of the user's loader."""

    def between(self, step: int, part: int, *, again: bool) -> None:
        """Seed the random generators for the code of the script before the block of ``step``.

        Unless ``again``, this code may change learning rates and the user's own state, so a copy of them is made.
        """

    def remember(self, step: int, *, whole: bool = False) -> None:
        """Copy learning rates and the user's own state, because a loop begins or is over.

        The code that the script runs next, before ``step``, may change them.

        Args:
            whole: copy all of the user's own state, with parts too large to copy at each step (averages of weights),
                and what a forward pass changes in the model itself (buffers).
        """


class StepAdapter(Protocol):
    """One step of this rank: how to copy the state before the block, and how to restore it when the block is aborted.

    Attributes:
        scaled: a gradient scaler is in use. A block without an update had gradients with inf or nan.
    """

    scaled: bool

    def begin(self, step: int) -> None:
        """Seed the random generators and copy the state that the forward pass changes."""

    def shield(self) -> None:
        """Let broken collectives complete instead of raising, because the block begins."""

    def record(self, name: str) -> None:
        """Copy the state that the named optimizer is about to change in an update before the vote."""

    def prepare_vote(self) -> None:
        """Wait for the device, and make values that must be the same on all ranks equal."""

    def enter_update(self) -> None:
        """Forbid collectives until :meth:`end`, because the vote has passed."""

    def end(self) -> None:
        """End the step, whose block has ended and is committed."""

    def release(self) -> None:
        """Let broken collectives raise again, because an exception of user code has left the block."""

    def abort(self) -> None:
        """Restore the state from before the aborted step."""


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
        """True if a collective of this process broke, or :meth:`poison` was called."""

    @property
    def reason(self) -> str:
        """The reason why the collectives of this process are broken."""

    def attach(
        self, hooks: Hooks, on_fault: Callable[[str], None], on_collective: Callable[[int, str], None]
    ) -> None:
        """Install hooks.

        ``on_fault`` is called with the reason of the first broken collective. ``on_collective`` is called at the start
        of each collective, with the number of collectives so far and the name.
        """

    def detach(self) -> None:
        """Remove what :meth:`attach` installed."""

    def is_fault(self, error: BaseException) -> bool:
        """Return whether ``error``, raised in a session, means in this framework that a peer is lost."""

    def vote(self, vector: list[int]) -> list[int]:
        """Return the sum of the int64 ``vector`` over all ranks. Raises: PeerLost."""

    def poison(self, reason: str) -> None:
        """Break all collectives of this process. Callable from any thread; returns at once."""

    def reconfigure(self, generation: Generation) -> None:
        """Rebuild all groups. Raises: GroupError."""

    def rehearse(self) -> bool:
        """Return whether the next step must run once without effect.

        Collectives then complete on this rank's own data.
        """

    def end_rehearsal(self) -> None:
        """End the run without effect, so that collectives communicate again."""


class Adapter(StateAdapter, StepAdapter, GroupAdapter, Protocol):
    """One framework, for one session. Methods raise what their implementation documents.

    Abilities that only some frameworks have are in ``optional_abilities.py``, with one protocol each.
    """
