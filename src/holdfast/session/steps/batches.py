"""The batches of one step, handed out as often as its block runs: each run finds what the first one found.

Theory. A block may take something out of its batch (``batch.pop("labels")``) or write into it in place. It runs again
after a fault and after a rehearsal, and must begin with the same. So each run gets new containers. The tensors in them
are the loader's, as long as the block does not write into them: each is marked when it is handed out, and torch counts
writes. Where a block has written is learned: of such a tensor, and of one in a place that was not seen before, the
block gets a copy. A block that writes now and then spoils what it was given before that was known; then the batch is
taken from the loader again. So is a batch with objects that are neither containers nor tensors.

Invariants:
1. What :meth:`Batches.give` returns is what the loader drew, or :meth:`Batches.spoiled` was true before.
2. A tensor that the block is known to write is never the loader's own: what a loader hands out again in its next epoch
   does not depend on how often a block ran.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from holdfast.errors import UnsupportedError
from holdfast.frameworks.common.batch_copies import Place, rebuilt
from holdfast.frameworks.common.optional_abilities import MarksTensors


class _Given(NamedTuple):
    """A tensor that a block was given, with its mark of that moment."""

    place: Place
    tensor: Any
    mark: object
    own: bool  # a copy, which nothing else holds


class Batches:
    """Of the steps of one loop.

    Args:
        adapter: knows the tensors, where a block can write into them.
    """

    def __init__(self, adapter: object) -> None:
        self._tensors = adapter if isinstance(adapter, MarksTensors) else None
        self._drawn: Sequence[Any] = (None,)
        self._given: dict[int, list[_Given]] = {}  # by part
        self._opaque: set[int] = set()  # parts with objects that nothing is known of
        self._written: dict[Place, bool] = {}  # whether a block has written there

    def __len__(self) -> int:
        return len(self._drawn)

    def put(self, drawn: Sequence[Any]) -> None:
        """The batches of the next step, one for each of its parts."""
        self._learn(ended=True)
        self._set(drawn)

    def forget(self) -> None:
        """The job has gone back: the block that ran last was cut off."""
        self._set((None,))

    def _set(self, drawn: Sequence[Any]) -> None:
        self._drawn, self._given, self._opaque = drawn, {}, set()

    def give(self, part: int) -> Any:
        """What the block of one part gets."""
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
        """What :meth:`give` has handed out holds objects of which there is no copy."""
        return part in self._opaque

    def spoiled(self, part: int) -> bool:
        """The batch of this part was given before, and is not certain to be what it was."""
        self._learn(ended=False)
        before = self._given.get(part, ())
        return part in self._opaque or any(not g.own and self._has_changed(g) for g in before)

    def again(self, drawn: Sequence[Any]) -> None:
        """The loader has drawn the batches of this step again.

        Raises:
            UnsupportedError: it holds what it draws, and the block has written into it.
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
        """Where the blocks that have run since have written; where they have not, when they ran to their end."""
        for given in self._given.values():
            for each in given:
                if self._has_changed(each):
                    self._written[each.place] = True
                elif ended:
                    self._written.setdefault(each.place, False)

    def _has_changed(self, given: _Given) -> bool:
        return self._tensors is not None and self._tensors.mark(given.tensor) != given.mark
