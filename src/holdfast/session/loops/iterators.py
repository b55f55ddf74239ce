"""The loops that a session gives to the script: over steps, epochs and phases."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any

from holdfast.errors import UnsupportedError, UsageError
from holdfast.frameworks.common.adapter import Adapter
from holdfast.frameworks.common.optional_abilities import StandsIn
from holdfast.runtime.node.deferred_rank import DeferredRank
from holdfast.session.checkpoints.after_block import AfterBlock
from holdfast.session.loops.loop import Loops
from holdfast.session.loops.script_source import counted, enclosed
from holdfast.session.loops.turn_position import IDIOM
from holdfast.session.loops.turns import Turns
from holdfast.session.steps.accumulation import checked_count, grouped
from holdfast.session.steps.step import Step, StepRunner
from holdfast.session.steps.warmup import rehearsals


class ScriptLoops:
    """The loops of a :class:`holdfast.session.session.Session`, which sets the attributes used here when it opens."""

    _adapter: Adapter
    _parts: int
    _loops: Loops
    _turns: Turns
    _behind: AfterBlock
    _blocks: StepRunner
    _spare: DeferredRank | None
    _rehearsing: bool
    _entered_by: tuple[FrameType, int] | None

    def _require_entered(self) -> None:
        raise NotImplementedError

    def _asked(self) -> None:
        raise NotImplementedError

    def _go_on_stage(self) -> None:
        raise NotImplementedError

    def takes_loops(self) -> None:
        """Allow any number of loops, because another library drives them."""
        self._loops.walk.several = True

    def epochs(self, count: int) -> Iterator[int]:
        """Return the epochs that are not finished: ``for epoch in s.epochs(10): for step in s.steps(loader): ...``.

        Each epoch runs once in the life of the job. The code after its loop over steps runs again only if a fault
        interrupted this code. It then starts from the state at the end of the loop. A process that joins later begins
        in the epoch in progress. The numbers count the epochs of the whole job, as ``step.epoch`` does.

        Args:
            count: total number of epochs. A larger number at a later start adds epochs.

        Raises:
            UsageError: ``count`` is not a number of epochs, or differs between ranks.
        """
        if isinstance(count, bool) or not isinstance(count, int) or count < 0:
            raise UsageError(
                f"s.epochs({count!r}): not a number of epochs", hint="for epoch in s.epochs(10): ..."
            )
        self._asked()
        return self._turns.run("epochs", count)

    def phase(self, name: str) -> Iterator[str]:
        """Run a phase once in the life of the job: ``for _ in s.phase("warmup"): for step in s.steps(...): ...``.

        Args:
            name: the name of the phase in messages; the order in the script identifies a phase.

        Returns:
            An iterator over ``name``; empty if the job has finished the phase.

        Raises:
            UsageError: ``name`` is empty, or the job had another phase at this place of the script.
        """
        if not isinstance(name, str) or not name:
            raise UsageError(f"s.phase({name!r}): not a name", hint='for _ in s.phase("warmup"): ...')
        self._asked()
        return (name for _ in self._turns.run(f'phase "{name}"', 1))

    def steps(
        self,
        loader: Any = None,
        *,
        until: int | None = None,
        epochs: int | None = None,
        batches: int | None = None,
    ) -> Iterator[Step]:
        """Return the steps from the current step of the job. Use each as ``with step as batch:``.

        Code before a block runs again when the block does, unless guarded: ``if ... and not step.again:``. After a
        restart of all ranks the code before the block, or after a loop, runs again with schedulers, learning rates and
        ``state=`` from before it. Several loops need :meth:`epochs` or :meth:`phase`; in an epoch, the data is that of
        this epoch.

        Args:
            loader: a DataLoader or any iterable of batches; None: the block gets None.
            until: stop when this many updates are done; the loader is cycled (``set_epoch`` is called).
            epochs: stop after this many passes over the loader; 1 when neither is given.
            batches: number of the loader's batches in one step, which gets a list of them (gradient accumulation); the
                last list of an epoch may be shorter.

        Raises:
            UsageError: neither a loader nor ``until``, a loader that cannot be iterated, or ranks that share a sampler
                have different datasets: another length or, if the dataset is only memory, another content. A dataset
                that is code may identify itself by an attribute ``fingerprint``, for instance the checksum of its file.
            UsageError: a second loop outside of epochs and phases, or a loop around this one that is neither; or
                ``enumerate`` around the steps, which counts runs of blocks.
            EmptyLoaderError: the loader yields no batch.
            StepError: a step was not entered by ``with``.
        """
        self._require_entered()
        if loader is None and until is None:
            raise UsageError("steps() needs a loader, or until=N", hint="s.steps(loader, until=10_000)")
        if loader is None and self._parts > 1:
            raise UnsupportedError(
                "steps() without a loader cannot be run in parts by fewer ranks than the job began with",
                hint="s.steps(loader, ...), or start without --shrink-to",
            )
        self._turns.close()
        walk = self._loops.walk
        if not walk.inside and not walk.several and enclosed(sys._getframe(1), self._entered_by):
            raise UsageError(
                "a loop over steps in a loop that the session does not know: its turns would run again at each start",
                hint=IDIOM,
            )
        if counted(sys._getframe(1)):
            raise UsageError(
                "enumerate() around s.steps(...) counts the runs of blocks, not the steps: a block runs again after a "
                "fault and for its check, and a process that joins or resumes begins at 0",
                hint="step.number, and in its epoch step.number % len(loader)",
            )
        many = checked_count(batches, loader)
        passes = epochs if until is not None or epochs is not None else 1
        self._behind.begin()
        loop = self._loops.run(loader, passes, until, many, self._behind, self._blocks)
        return loop if self._spare is None else self._after_rehearsal(loader, many, loop)

    def _after_rehearsal(self, loader: Any, batches: int | None, loop: Iterator[Step]) -> Iterator[Step]:
        self._rehearsing = True
        feed = None if loader is None else grouped(self._adapter.feed(loader), batches)
        try:
            yield from rehearsals(self._adapter, self._blocks, feed)
            self._rehearsing = False
            self._go_on_stage()
            if isinstance(self._adapter, StandsIn) and feed is not None and feed.repeatable:
                self._loops.begun, feed = feed, None
        finally:
            if feed is not None:
                feed.close()
        yield from loop
