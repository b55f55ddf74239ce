"""The batches of one step, given to its block with the same content at each run of the block.

Theory. A block may remove an entry of its batch (``batch.pop("labels")``) or write into a tensor of it. The block runs
again after a fault and after a rehearsal, and must begin with the same data. So each run gets new containers. They hold
the loader's own tensors where the block does not write. :class:`Batches` records the places in a batch where blocks
write: each given tensor has a mark, which changes with a write. The block gets a copy of each tensor in such a place,
and in a place that was not seen before. A block that writes only sometimes may change a tensor of the loader before
that place is recorded. The batch is then drawn from the loader again. A batch is also drawn again if it has objects
that are neither containers nor tensors.

With fewer ranks than at the start of the job, a step has several blocks, each with its own batch. Block ``part`` of a
step gets batch ``part``.

Invariants:
1. :meth:`Batches.give` returns the data that the loader drew, unless :meth:`Batches.spoiled` was true before the call.
2. If a block is known to write into a tensor, it gets a copy and never the loader's own tensor. The data of the next
   epoch therefore does not depend on the number of runs of a block.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from holdfast.errors import UnsupportedError
from holdfast.frameworks.common.batch_copies import Place, rebuilt
from holdfast.frameworks.common.optional_abilities import MarksTensors


class _Given(NamedTuple):
    """A tensor given to a block, its place in the batch, and its mark at that time. A write changes the mark."""

    place: Place
    tensor: Any
    mark: object
    own: bool  # a copy that only the block holds


class Batches:
    """The batches of the steps of one loop.

    Args:
        adapter: the framework, which marks tensors to detect writes, if it can (``MarksTensors``).
    """

    def __init__(self, adapter: object) -> None:
        self._tensors = adapter if isinstance(adapter, MarksTensors) else None
        self._drawn: Sequence[Any] = (None,)
        self._given: dict[int, list[_Given]] = {}  # by index of the block in its step
        # Blocks whose batch has an object that cannot be copied, with the class of that object.
        self._uncopied: dict[int, str] = {}
        self._written: dict[Place, bool] = {}  # True: a block has written into the tensor at this place

    def __len__(self) -> int:
        return len(self._drawn)

    def put(self, drawn: Sequence[Any]) -> None:
        """Set the batches of the next step, one for each block of that step."""
        self._learn(ended=True)
        self._set(drawn)

    def forget(self) -> None:
        """Drop the batches of a block that was cut off because the job went back to an earlier step.

        The writes of that block are not recorded.
        """
        self._set((None,))

    def _set(self, drawn: Sequence[Any]) -> None:
        self._drawn, self._given, self._uncopied = drawn, {}, {}

    def give(self, part: int) -> Any:
        """Return the batch for block ``part`` of the step. Tensors into which the block may write are copies."""
        self._learn(ended=False)
        given: list[_Given] = []

        def leaf(value: Any, place: Place) -> Any:
            if isinstance(value, np.ndarray):
                return value.copy()
            if self._tensors is None:
                return value
            if self._tensors.mark(value) is None:
                self._uncopied.setdefault(part, f"{type(value).__module__}.{type(value).__qualname__}")
                return value
            own = self._written.get(place, True)
            handed = self._tensors.duplicate(value) if own else value
            given.append(_Given(place, handed, self._tensors.mark(handed), own))
            return handed

        batch = rebuilt(self._drawn[part], leaf)
        self._given[part] = given
        return batch

    def uncopied(self, part: int) -> str:
        """Return the class of an object that cannot be copied, from the batch last given to block ``part``; or ""."""
        return self._uncopied.get(part, "")

    def spoiled(self, part: int) -> bool:
        """Return whether the batch of block ``part`` was given before, and the loader's data in it may have changed."""
        self._learn(ended=False)
        before = self._given.get(part, ())
        return part in self._uncopied or any(not g.own and self._has_changed(g) for g in before)

    def again(self, drawn: Sequence[Any]) -> None:
        """Replace the batches of this step by ``drawn``, which the loader has drawn again for the same step.

        Raises:
            UnsupportedError: the loader returns the same tensors again, and the block has written into one of them.
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
            ended: the last block ran to its end. Tensors without a write are then recorded as unwritten.
        """
        for given in self._given.values():
            for each in given:
                if self._has_changed(each):
                    self._written[each.place] = True
                elif ended:
                    self._written.setdefault(each.place, False)

    def _has_changed(self, given: _Given) -> bool:
        return self._tensors is not None and self._tensors.mark(given.tensor) != given.mark
