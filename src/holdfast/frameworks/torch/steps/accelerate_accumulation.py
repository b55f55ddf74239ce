"""The use of accelerate's gradient accumulation inside the block of a step.

Theory. ``with accelerator.accumulate(model)`` counts micro-batches. At every N-th micro-batch, accelerate synchronises
gradients and lets the optimizer step. The count continues from one block to the next, so a block that runs again would
begin in the middle of a count. To find the end of an epoch, accelerate asks its own loader, from which the session does
not draw. In a session a step is one block. So the count starts with the block, and gradients are synchronised at the
last batch of the block.
"""

from __future__ import annotations

import sys
from typing import Any

MODULE = "accelerate.accelerator"


class Accumulating:
    """The count of micro-batches in the open block, used by all accelerators of this process."""

    def __init__(self) -> None:
        self._original: Any = None
        self._counts: dict[int, int] = {}  # by accelerator id, in the open block
        self._batches: int | None = None
        self._open = False

    def expect(self, batches: int | None) -> None:
        """Set the number of batches of the next block; None if it is not known."""
        self._batches = batches

    def begin(self) -> None:
        """Begin to count the micro-batches of a block. The first call replaces accelerate's method that counts them."""
        self._counts, self._open = {}, True
        owner: Any = getattr(sys.modules.get(MODULE), "Accelerator", None)
        if self._original is None and hasattr(owner, "_do_sync"):
            self._original = owner._do_sync
            owner._do_sync = lambda accelerator: self._count(accelerator)

    def end(self) -> None:
        """Let accelerate's own method count the micro-batches outside of the block."""
        self._open = False

    def close(self) -> None:
        """Restore accelerate's method at the end of the session."""
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
