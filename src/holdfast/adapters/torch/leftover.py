"""Gradients that a block without an update leaves behind, and to which the next one adds.

No checkpoint holds gradients, and an aborted step drops them: what accumulates over several blocks would be lost by any
fault and by every resume. Looked for where it is sure and costs nothing: gradients that were left are still there, and
not zero, when the next backward begins. Who skips an update and clears them first (``zero_grad`` at the start) is fine.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from holdfast.errors import StepError


class Leftover:
    """Of the newest committed block."""

    def __init__(self) -> None:
        self._step = -1
        self._left: list[tuple[torch.Tensor, torch.Tensor]] = []  # parameter, its gradient

    def note(self, step: int, parameters: Iterable[torch.Tensor]) -> None:
        """Step ``step`` is committed without an update."""
        self._step = step
        self._left = [(p, p.grad) for p in parameters if p.grad is not None]

    def clear(self) -> None:
        """The gradients were used, or dropped."""
        self._left = []

    def check(self) -> None:
        """A backward begins. Raises: StepError."""
        left, self._left = self._left, []
        if any(parameter.grad is gradient and bool(gradient.any()) for parameter, gradient in left):
            raise StepError(
                f"step {self._step} made no update but leaves gradients, which no checkpoint holds",
                hint="accumulate inside one block: `for micro in batch.chunk(4): loss(micro).backward()`, then "
                "optimizer.step(); or call optimizer.zero_grad() before the next backward",
            )
