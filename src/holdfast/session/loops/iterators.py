"""The loops that a session gives to the script: over steps, epochs and phases."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any

from holdfast.errors import UnsupportedError, UsageError
from holdfast.frameworks.common.adapter import Adapter
from holdfast.frameworks.common.optional_abilities import StandsIn
from holdfast.runtime.node.deferred_rank import DeferredRank
from holdfast.session.checkpoints.after_block import AfterBlock
from holdfast.session.loops.combined_feed import feed_of, together
from holdfast.session.loops.loop import Loops
from holdfast.session.loops.script_source import counter_around, enclosed
from holdfast.session.loops.turn_position import IDIOM
from holdfast.session.loops.turns import Turns
from holdfast.session.steps.accumulation import checked_count
from holdfast.session.steps.step import Step, StepRunner
from holdfast.session.steps.warmup import rehearsals

_IN_PLACE_OF = {
    "enumerate": "step.number, and in its epoch step.number % len(loader)",
    "zip": "step.number for a range; for a second loader, s.steps(loader, second)",
    "islice": "s.steps(loader, until=N)",
}
"""What a script writes instead of a function that counts the runs of blocks."""


class Steps(Iterator[Step]):
    """The steps of one loop, in order, with a length for progress bars and helpers that call ``len()``.

    Args:
        steps: the iterator of the loop.
        loader: the loader of the loop.
        batches: number of the loader's batches in one step.
        passes: number of passes over the loader; None if the loop does not end with its data.
    """

    def __init__(self, steps: Iterator[Step], loader: Any, batches: int, passes: int | None) -> None:
        self._steps = steps
        self._loader = loader
        self._batches = batches
        self._passes = passes

    def __iter__(self) -> Iterator[Step]:
        """Return the iterator of the loop, without this object around each step.

        Raises:
            UsageError: ``enumerate``, ``zip`` or ``islice`` asks for the iterator.
        """
        _refuse_counter(sys._getframe(1))
        return self._steps

    def __next__(self) -> Step:
        """Return the next step."""
        return next(self._steps)

    def __len__(self) -> int:
        """Return the number of steps in the whole loop, including steps that the job did before a fault or a restart.

        Raises:
            TypeError: the loop ends with ``until``, or the loader has no length.
        """
        if self._passes is None:
            raise TypeError("s.steps(until=N) has no len(): it ends when the job has done N updates")
        return self._passes * math.ceil(len(self._loader) / self._batches)


def _refuse_counter(caller: FrameType) -> None:
    if counter := counter_around(caller):
        raise UsageError(
            f"{counter}() around s.steps(...) counts the runs of blocks, not the steps: a block runs again after a "
            "fault and for its check, and a process that joins or resumes begins at 0",
            hint=_IN_PLACE_OF[counter],
        )


class ScriptLoops:
    """The methods of a :class:`holdfast.session.session.Session` that return its loops: a mixin of that class."""

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
        """Allow any number of loops over steps outside of epochs and phases, because another library drives them."""
        self._loops.walk.several = True

    def epochs(self, count: int) -> Iterator[int]:
        """Return an iterator over the numbers of the epochs that the job has not finished.

        Each epoch runs once in the life of the job. The code after its loop over steps runs again only if a fault has
        interrupted that code. Then it starts from the state at the end of the loop. A process that joins or resumes
        begins in the epoch in progress. Epochs are numbered from 0 over the whole job, as in ``step.epoch``.

        Args:
            count: total number of epochs of the job. A larger number at a later start adds epochs.

        Raises:
            UsageError: ``count`` is not a number of epochs, or differs between ranks.

        Example:
            >>> for epoch in s.epochs(10):  # doctest: +SKIP
            ...     for step in s.steps(loader):
            ...         with step as batch:
            ...             train(batch)
            ...     evaluate(model)
        """
        if isinstance(count, bool) or not isinstance(count, int) or count < 0:
            raise UsageError(
                f"s.epochs({count!r}): not a number of epochs", hint="for epoch in s.epochs(10): ..."
            )
        self._asked()
        return self._turns.run("epochs", count)

    def phase(self, name: str) -> Iterator[str]:
        """Return an iterator that runs a phase of the training once in the life of the job.

        Args:
            name: name of the phase. A phase is identified by its order in the script, so the name and the order must
                stay the same at each start.

        Returns:
            An iterator with one item, ``name``; without items if the job has finished the phase.

        Raises:
            UsageError: ``name`` is empty, or the job had another phase at this point of the script.

        Example:
            >>> for _ in s.phase("warmup"):  # doctest: +SKIP
            ...     for step in s.steps(loader, until=1000):
            ...         with step as batch:
            ...             train(batch)
        """
        if not isinstance(name, str) or not name:
            raise UsageError(f"s.phase({name!r}): not a name", hint='for _ in s.phase("warmup"): ...')
        self._asked()
        return (name for _ in self._turns.run(f'phase "{name}"', 1))

    def steps(
        self,
        loader: Any = None,
        *further: Any,
        until: int | None = None,
        epochs: int | None = None,
        batches: int | None = None,
    ) -> Steps:
        """Return an iterator over the steps that the job has not done. Run each by ``with step as batch:``.

        A block may run again after a fault, and the script's code before it as well. Guard code that must run once by
        ``if not step.again:``. After a restart of all ranks, code before the block or after the loop runs again. The
        schedulers, learning rates and ``state=`` are then those from before that code. A script with several loops
        over steps puts each into :meth:`epochs` or :meth:`phase`. In an epoch, the loader gives the data of that
        epoch; with ``until`` alone, it continues where the epoch before ended.

        Args:
            loader: a DataLoader or any iterable of batches; if None, the block gets None instead of a batch.
            further: more loaders, such as one of unlabeled data. The block then gets a tuple with one batch of each.
                ``loader`` determines the epochs. A further loader begins again whenever it ends.
            until: end the loop when the job has done this many updates. The loader is iterated as often as needed, with
                ``set_epoch`` before each pass.
            epochs: end the loop after this many passes over the loader. 1 if neither ``until`` nor ``epochs`` is given.
            batches: number of the loader's batches in one step (gradient accumulation). The block gets a list of them;
                the last list of an epoch may be shorter.

        Returns:
            An iterator of steps. Its ``len()`` is the number of steps in the whole loop, also after a restart. It has
            no ``len()`` with ``until``, or if the loader has none.

        Raises:
            UsageError: there is neither ``loader`` nor ``until``, or the loader cannot be iterated.
            UsageError: ranks that share a sampler have datasets of different length or content. The content is compared
                if the dataset is in memory, or has an attribute ``fingerprint`` (such as the checksum of a file).
            UsageError: this is a second loop over steps, and it is not within :meth:`epochs` or :meth:`phase`.
            UsageError: a ``for`` loop other than those of :meth:`epochs` and :meth:`phase` is around this call.
            UsageError: ``enumerate``, ``zip`` or ``islice`` is around the steps. It would count runs of blocks, not
                steps.
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
        _refuse_counter(sys._getframe(1))
        loader = together(loader, further)
        many = checked_count(batches, loader)
        passes = epochs if until is not None or epochs is not None else 1
        self._behind.begin()
        loop = self._loops.run(loader, passes, until, many, self._behind, self._blocks)
        if self._spare is not None:
            loop = self._after_rehearsal(loader, many, loop)
        return Steps(loop, loader, many or 1, passes if until is None else None)

    def _after_rehearsal(self, loader: Any, batches: int | None, loop: Iterator[Step]) -> Iterator[Step]:
        self._rehearsing = True
        feed = None if loader is None else feed_of(self._adapter, loader, batches)
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
