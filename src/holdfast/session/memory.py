"""The memory tier of a session: this rank's state of every N-th step, in shared memory that outlives the process.

Theory. Where a box has one holder, the loss of that rank is the loss of the box. So each rank copies its whole state,
tensors, plain values and data position, into the run's shared memory (``store/memory.py``) before it shows the step as
committed: whoever replaces it finds the state of exactly that step. With N above 1 all ranks go back to the newest
step that everybody has there, the living in place, and do the steps after it again.

Invariants:
1. All ranks keep the same steps: multiples of N, and the step at which the session opened.
2. READY(s) with s a multiple of N is shown only when the state of s is kept.
3. A lack of shared memory ends the tier, with a warning, and never the training.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from holdfast.adapters.base import Adapter, Collected
from holdfast.errors import CheckpointInvalid, StateError
from holdfast.session.resume import Resumed
from holdfast.store.memory import Slots, open_kept
from holdfast.store.values import decode_values, encode_values

log = logging.getLogger("holdfast")

Values = Callable[[Collected, int], Mapping[str, object]]


class Tier:
    """One rank's part of the memory tier.

    Args:
        adapter: the framework.
        directory: of the run's shared memory; None: there is no agent to outlive this process.
        every: steps between two states; 0: nothing is kept.
        values: plain values common to all ranks, given the collected state and its step.
        locals_: plain values of this rank alone.
    """

    def __init__(
        self,
        adapter: Adapter,
        directory: Path | None,
        every: int,
        values: Values,
        locals_: Callable[[], Mapping[str, object]],
    ) -> None:
        self.cost_s = 0.0  # of the last copy
        self.size_bytes = 0
        self._adapter = adapter
        self._directory = directory
        self._every = every if directory is not None else 0
        self._values = values
        self._locals = locals_
        self._slots: Slots | None = None
        self.know_rank()

    def know_rank(self) -> None:
        """The adapter knows the rank whose states are kept: from the start, or since a spare was called."""
        self._slots = None if self._directory is None else Slots(self._directory, self._adapter.rank)

    @property
    def on(self) -> bool:
        """States are kept."""
        return self._every > 0

    def steps(self) -> tuple[int, ...]:
        """Steps whose states are there."""
        return () if self._slots is None else self._slots.steps()

    def start(self, step: int) -> None:
        """The session stands at ``step``: what is kept of other steps does not count any more."""
        if self._slots is None:
            return
        self._slots.keep_only(step)
        if self.on and step not in self._slots.steps():
            self._keep(step)

    def committing(self, step: int) -> None:
        """The block before ``step`` has ended and is about to be shown as committed."""
        if self.on and step % self._every == 0:
            self._keep(step)

    def _keep(self, step: int) -> None:
        assert self._slots is not None
        began_s = time.perf_counter()
        try:
            collected = self._adapter.collect()
            self.size_bytes = self._slots.keep(
                step,
                collected,
                collected.layout(self._adapter.rank, self._adapter.world_size),
                encode_values(dict(self._values(collected, step))),
                encode_values(dict(self._locals()), "locals"),
            )
        except StateError as error:
            log.warning("holdfast: no state is kept in memory any more: %s", error)
            self._every = 0
            self._slots.remove()
        self.cost_s = time.perf_counter() - began_s

    def verify(self, step: int) -> None:
        """Raises: CheckpointInvalid when the state of ``step`` is not there or damaged; then it is dropped."""
        with self._open(step):
            return

    def load(self, step: int) -> Resumed:
        """Fill this rank's state with the one of ``step``.

        Raises:
            CheckpointInvalid: it is not there or damaged, and nothing was changed.
            CheckpointMismatch: of another model.
        """
        with self._open(step) as kept:
            if kept.world != self._adapter.world_size:
                raise CheckpointInvalid(f"{kept.path.name} is of a job of {kept.world} ranks")
            values: dict[str, Any] = _mapping(kept.values)
            restore = self._adapter.restore(kept.catalogue(), values)
            for meta, data in restore.buffers():
                if len(data):
                    np.copyto(
                        np.frombuffer(data, np.uint8), np.frombuffer(kept.view(meta.fqn, meta.box), np.uint8)
                    )
            restore.finish()
            return Resumed(kept.path, step, values["session"], _mapping(kept.local))

    def _open(self, step: int) -> Any:
        if self._directory is None:
            raise CheckpointInvalid("this process has no shared memory that outlives it")
        return open_kept(self._directory, self._adapter.rank, step)

    def close(self) -> None:
        """The session has ended in order."""
        if self._slots is not None:
            self._slots.remove()


def _mapping(data: bytes) -> dict[str, Any]:
    values = decode_values(data, "values in memory")
    if not isinstance(values, dict):
        raise CheckpointInvalid("the values in memory are none")
    return values
