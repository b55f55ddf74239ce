"""The batches of one step, given to its block in the same condition each time it runs.

Theory. A block may take something out of its batch (``batch.pop("labels")``) or write into it in place. The block runs
again after a fault and after a rehearsal, and must begin with the same data. So each run gets new containers. The
tensors in them are the loader's as long as the block does not write into them. Each tensor is marked when it is given,
and torch counts writes. The places in a batch where blocks write are recorded. The block gets a copy of a tensor in
such a place, and in a place that was not seen before. A block that writes only sometimes may change a batch before its
write is recorded. Then the batch is taken from the loader again, and so is a batch with objects that are neither
containers nor tensors.

With fewer ranks than at the begin of the job, a step has several blocks, each with its own batch. Block ``part`` of a
step gets batch ``part``.

Invariants:
1. :meth:`Batches.give` returns the data that the loader drew, or :meth:`Batches.spoiled` was true before.
2. A tensor that the block is known to write is never the loader's own. What a loader gives again in its next epoch
   therefore does not depend on how often a block ran.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from holdfast.errors import UnsupportedError
from holdfast.frameworks.common.batch_copies import Place, rebuilt
from holdfast.frameworks.common.optional_abilities import MarksTensors


class _Given(NamedTuple):
    """A tensor that a block was given, with its mark at that moment."""

    place: Place
    tensor: Any
    mark: object
    own: bool  # a copy that only the block holds


class Batches:
    """The batches of the steps of one loop.

    Args:
        adapter: tells whether a block has written into a tensor, if the framework can.
    """

    def __init__(self, adapter: object) -> None:
        self._tensors = adapter if isinstance(adapter, MarksTensors) else None
        self._drawn: Sequence[Any] = (None,)
        self._given: dict[int, list[_Given]] = {}  # by index of the block in its step
        self._opaque: set[int] = set()  # blocks given objects that are neither containers nor tensors
        self._written: dict[Place, bool] = {}  # whether a block has written there

    def __len__(self) -> int:
        return len(self._drawn)

    def put(self, drawn: Sequence[Any]) -> None:
        """Set the batches of the next step, one for each of its blocks."""
        self._learn(ended=True)
        self._set(drawn)

    def forget(self) -> None:
        """Drop the batches of a block that was cut off because the job went back.

        Where that block has written is not recorded.
        """
        self._set((None,))

    def _set(self, drawn: Sequence[Any]) -> None:
        self._drawn, self._given, self._opaque = drawn, {}, set()

    def give(self, part: int) -> Any:
        """Return the batch for block ``part`` of the step, with copies of the tensors that the block may write."""
        self._learn(ended=False)
        given: list[_Given] = []

        def leaf(value: Any, place: Place) -> Any:
            if isinstance(value, np.ndarray):
                return value.copy()
            if self._tensors is None:
                return value
            if self._tensors.mark(value) is None:
                self._opaque.add(part)
                return value
            own = self._written.get(place, True)
            handed = self._tensors.duplicate(value) if own else value
            given.append(_Given(place, handed, self._tensors.mark(handed), own))
            return handed

        batch = rebuilt(self._drawn[part], leaf)
        self._given[part] = given
        return batch

    def opaque(self, part: int) -> bool:
        """Return whether the batch last given to block ``part`` holds objects that cannot be copied."""
        return part in self._opaque

    def spoiled(self, part: int) -> bool:
        """Return whether the batch of block ``part`` was given before and may have been changed since."""
        self._learn(ended=False)
        before = self._given.get(part, ())
        return part in self._opaque or any(not g.own and self._has_changed(g) for g in before)

    def again(self, drawn: Sequence[Any]) -> None:
        """Set the batches that the loader has drawn again for this step.

        Raises:
            UnsupportedError: the loader keeps its batches, and the block has written into one.
        """
        each = [given for part in self._given.values() for given in part]
        written = [given.tensor for given in each if not given.own and self._has_changed(given)]

        def leaf(value: Any, place: Place) -> Any:
            if self._tensors is not None and any(self._tensors.share_memory(value, t) for t in written):
                raise UnsupportedError(
                    "the block has written in place into a batch that the loader keeps: it cannot run again on it",
                    hint="work on a copy in the block: x = x.clone()",
                )
            return value

        for batch in drawn:
            rebuilt(batch, leaf)
        self._set(drawn)

    def _learn(self, *, ended: bool) -> None:
        """Record the places where blocks have written.

        Args:
            ended: the last block ran to its end. Places where it has not written are then recorded as well.
        """
        for given in self._given.values():
            for each in given:
                if self._has_changed(each):
                    self._written[each.place] = True
                elif ended:
                    self._written.setdefault(each.place, False)

    def _has_changed(self, given: _Given) -> bool:
        return self._tensors is not None and self._tensors.mark(given.tensor) != given.mark
