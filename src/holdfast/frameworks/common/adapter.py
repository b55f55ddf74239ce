"""The interface between a session and a framework: three protocols, for the state, the step and the process groups.

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
    """The exception that leaves the block of a step that will run again. ``with step`` catches it.

    It is not an ``Exception``, so that ``except Exception`` in user code does not catch it.
    """


class Unsevered(GroupError):
    """The error of a process that hangs forever in a broken collective. Another process must take its seat."""


class GroupsDiffer(GroupError):
    """The error of ranks that hold different process groups: they cannot continue together, and no retry helps."""


class Collected(Protocol):
    """The training state of one rank at one moment, as a ``TensorSource``: the store's interface for data to save."""

    values: dict[str, Plain]

    def view(self, fqn: str, box: Box) -> memoryview:
        """Return the bytes of one box of tensor ``fqn``, C-contiguous. This rank must hold the box."""

    def layout(self, rank: int, world_size: int) -> RankLayout:
        """Return the boxes that this rank holds."""


class Restore(Protocol):
    """A load in progress: the caller fills the buffers, then calls :meth:`finish`."""

    def buffers(self) -> list[tuple[TensorMeta, memoryview]]:
        """Return every box to fill, with the writable bytes for its values."""

    def finish(self) -> None:
        """Put the loaded values into the framework's objects. Call this after all buffers are filled and verified."""


class DataIdentity(NamedTuple):
    """The identity of a dataset, by which two processes compare their data.

    Attributes:
        length: number of samples.
        content: digest of the data; empty if unknown.
        shared: True if every rank must have the same dataset.
    """

    length: int
    content: str
    shared: bool

    def differs(self, other: DataIdentity) -> str:
        """Return the difference between this dataset and ``other`` in words; empty if no difference is seen."""
        if self.length != other.length:
            return f"{plural(self.length, 'sample')}, not {other.length}"
        if self.content and other.content and self.content != other.content:
            return f"as many samples ({self.length}), but other ones"
        return ""


class Feed(Protocol):
    """The batches of a loader, epoch after epoch, with a position that can be saved."""

    epoch: int
    last_in_epoch: bool
    # Drawing a batch without using it changes nothing: seek() can still go to any position.
    repeatable: bool
    rewinds: bool  # the loop that draws from this feed can go back to an earlier position

    def place(self) -> Mapping[str, int]:
        """Return the position after the last batch drawn.

        Returns:
            A mapping with ``epoch``, ``batch`` (number of batches that this rank has drawn in the epoch), and all other
            values that :meth:`seek` needs.
        """

    def seek(self, place: Mapping[str, int], local: Plain = None) -> None:
        """Move to the position ``place``. ``local`` is the result of :meth:`local_state` at that position."""

    def local_state(self) -> Plain:
        """Return the part of the position that only this rank knows; None if there is no such part."""

    def identity(self) -> DataIdentity | None:
        """Return the identity of the dataset that this feed draws from; None if it is not known."""

    def draw(self, epochs: int | None = None) -> Any:
        """Return the next batch. Raises: StopIteration: ``epochs`` epochs are over (None sets no limit)."""

    def close(self) -> None:
        """Stop the worker processes of the loader."""


def length_of(loader: Any) -> int | None:
    """Return the number of batches in an epoch of the user's loader; None if it has no length."""
    try:
        return len(loader)
    except TypeError:
        return None


OnCollective = Callable[[int, str, bool], None]
"""Function that is called at the start of each collective: number, name, whether all ranks of the job make it."""


class Hooks(NamedTuple):
    """Functions of the session that the adapter calls from inside user code, in the main thread."""

    backward: Callable[[], None]  # the first gradient of a step is being computed
    update: Callable[[str], None]  # the named optimizer is about to change weights
    updated: Callable[[str], None]  # the named optimizer has changed weights
    waited: Callable[[int, int], None] = lambda since_ns, until_ns: None  # a wait for peers; CLOCK_MONOTONIC
    compiling: Callable[[bool], None] = lambda on: None  # the compilation of user code begins (True) or ends


class StateAdapter(Protocol):
    """The training state of this rank: how to copy it, load it, and draw its batches.

    Attributes:
        rank: rank of this process.
        world_size: number of ranks.
    """

    rank: int
    world_size: int

    def collect(self, *, frozen: bool = False, before: int = -1) -> Collected:
        """Return the state now, or, if ``frozen``, at the start of the current step. Callable from any thread.

        Args:
            before: number of a step; -1 for no step. The script's code before this step may have changed learning
                rates, schedules and the user's own state. These are taken from copies made before that code, if there
                are copies (see :meth:`between`, :meth:`remember`).
        """

    def state_size(self) -> int:
        """Return a number that changes when this rank's layout changes."""

    def restore(self, catalogue: Catalogue, values: Mapping[str, Plain]) -> Restore:
        """Prepare a load of the checkpoint with these tensors and plain values. Return the load."""

    def feed(self, loader: Any) -> Feed:
        """Return the batches of the user's loader as a feed."""

    def between(self, step: int, part: int, *, again: bool) -> None:
        """Seed the random generators for the code that the script runs before the block of ``step``.

        Unless ``again``, copy learning rates and the user's own state, because that code may change them.

        Args:
            part: number of the block, if the step consists of several blocks; otherwise 0.
            again: the code runs a second time.
        """

    def remember(self, step: int, *, whole: bool = False) -> None:
        """Copy learning rates and the user's own state, because a loop begins or has ended.

        The code that the script runs next, before ``step``, may change them.

        Args:
            whole: copy also the user's objects that are too large to copy at each step (averages of weights), and the
                part of the model that a forward pass changes (buffers).
        """


class StepAdapter(Protocol):
    """One step of this rank: how to copy the state before the block, and how to restore it when the block is aborted.

    Attributes:
        scaled: a gradient scaler is in use. If a block then makes no update, its gradients had inf or nan.
    """

    scaled: bool

    def begin(self, step: int) -> None:
        """Seed the random generators for ``step``, and copy the state that the forward pass changes."""

    def shield(self) -> None:
        """Let broken collectives complete instead of raising. Called when the block begins."""

    def record(self, name: str) -> None:
        """Copy the state that the named optimizer is about to change. Called for an update before the vote."""

    def prepare_vote(self) -> None:
        """Wait for the device. Make values equal on all ranks if they must be equal, such as buffers of the model."""

    def enter_update(self) -> None:
        """Forbid collectives until :meth:`end`. Called when the vote has passed."""

    def end(self) -> None:
        """End the step. Called when its block has ended and is committed."""

    def release(self) -> None:
        """Let broken collectives raise again. Called when an exception of user code has left the block."""

    def abort(self) -> None:
        """Restore the state from before the aborted step."""


class GroupAdapter(Protocol):
    """The collectives of this rank: how to vote with them, break them and build them again.

    Attributes:
        rank: rank of this process.
        world_size: number of ranks.
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
        """The reason why the collectives of this process are broken; empty if they are not."""

    def attach(self, hooks: Hooks, on_fault: Callable[[str], None], on_collective: OnCollective) -> None:
        """Install hooks in the framework.

        ``on_fault`` is called with the reason of the first broken collective. ``on_collective`` is called at the start
        of each collective, with the number of collectives so far, the name of the collective, and whether all ranks of
        the job make it.
        """

    def detach(self) -> None:
        """Remove what :meth:`attach` installed."""

    def is_fault(self, error: BaseException) -> bool:
        """Return whether ``error``, raised inside a session, is an error of this framework about a lost peer."""

    def vote(self, vector: list[int]) -> list[int]:
        """Return the sum of the int64 ``vector`` over all ranks. Raises: PeerLost."""

    def poison(self, reason: str) -> None:
        """Break all collectives of this process. Callable from any thread; returns at once."""

    def reconfigure(self, generation: Generation) -> None:
        """Rebuild all process groups for ``generation``. Raises: GroupError: a group could not be built."""

    def rehearse(self) -> bool:
        """Return whether the next step must run once without effect (a rehearsal).

        If so, collectives then complete on this rank's own data until :meth:`end_rehearsal`.
        """

    def end_rehearsal(self) -> None:
        """End the rehearsal, so that collectives communicate again."""


class Adapter(StateAdapter, StepAdapter, GroupAdapter, Protocol):
    """One framework, for one session. Each method raises the errors that its implementation documents.

    Abilities that only some frameworks have are in ``optional_abilities.py``, with one protocol each.
    """
