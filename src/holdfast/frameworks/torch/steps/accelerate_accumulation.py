"""Accelerate's gradient accumulation in the block of a step.

Theory. ``with accelerator.accumulate(model)`` counts micro-batches, and synchronises gradients and lets the optimizer
step at every N-th one. Its count goes on from one block to the next, so a block that runs again would begin in the
middle of it. And at the end of an epoch it asks its own loader, from which the session does not draw. In a session a
step is one block: the count begins with it, and the last of its batches is the one that is synchronised.
"""

from __future__ import annotations

import sys
from typing import Any

MODULE = "accelerate.accelerator"


class Accumulating:
    """Counts for all accelerators of this process, while it is open."""

    def __init__(self) -> None:
        self._original: Any = None
        self._counts: dict[int, int] = {}  # by accelerator, in the open block
        self._batches: int | None = None
        self._open = False

    def expect(self, batches: int | None) -> None:
        """The next block has so many batches; None: what it has is not known."""
        self._batches = batches

    def begin(self) -> None:
        """A block begins."""
        self._counts, self._open = {}, True
        owner: Any = getattr(sys.modules.get(MODULE), "Accelerator", None)
        if self._original is None and hasattr(owner, "_do_sync"):
            self._original = owner._do_sync
            owner._do_sync = lambda accelerator: self._count(accelerator)

    def end(self) -> None:
        """Out of the block accelerate counts for itself."""
        self._open = False

    def close(self) -> None:
        """The session is over."""
        if self._original is not None:
            sys.modules[MODULE].Accelerator._do_sync = self._original
            self._original = None

    def _count(self, accelerator: Any) -> None:
        if not self._open:
            self._original(accelerator)
            return
        count = self._counts[id(accelerator)] = self._counts.get(id(accelerator), 0) + 1
        state = accelerator.gradient_state
        accelerator.step = count
        state._set_sync_gradients(count == self._batches or count % state.num_steps == 0)
