"""The refusal of gradients that a block leaves behind, so that the next block would add to them.

No checkpoint holds gradients, and an aborted step drops them. So a sum over several blocks would be lost in any fault
and at every resume. A gradient is refused only if three things hold: it existed when the block began, it is still there
when the first backward pass of the block reaches the output of its module, and it is not zero. It is fine to clear
gradients before that backward pass (``zero_grad`` at the start, or of each optimizer before its own backward pass). It
is also fine to leave them in a module that this block does not train. With several optimizers, the backward pass of one
network may pass through another one whose gradients are cleared later (GANs that train the generator first). So there
the refusal waits for the update, which the left-over gradient must still reach. A block may also pass through a frozen
network and not train it. So at the vote, a gradient is refused only if the block has added to it, or if its optimizer
is about to step.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import NoReturn

import torch
from torch import nn

from holdfast.errors import StepError
from holdfast.frameworks.torch import private_api
from holdfast.frameworks.torch.state.boxes import local_of, writes_of

# A parameter, the gradient that it had, and the number of the writes to this gradient.
_Gradient = tuple[torch.Tensor, weakref.ref[torch.Tensor], int]

_ADVICE = (
    "call optimizer.zero_grad() in each block, before backward or after optimizer.step(); to accumulate, do so inside "
    "one block: `for step in s.steps(loader, batches=4): with step as batches: for batch in batches: ...`, then "
    "optimizer.step(); or over parts of a batch, batch.chunk(4)"
)


class Leftover:
    """The search for gradients that an earlier block left and that are still there in the open block.

    Args:
        modules: the modules that the session was given.
        trained: returns the parameters that the session's optimizers update.
        several: the session has several optimizers.
        scaled: the session has a ``GradScaler``, which may leave out the updates of a step.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        trained: Callable[[], Iterable[torch.Tensor]],
        *,
        several: bool,
        scaled: bool,
    ) -> None:
        self._parameters = [list(module.parameters()) for module in modules]
        self._trained = trained
        self._several = several
        self._scaled = scaled
        self._left: list[list[_Gradient]] = [[] for _ in modules]
        self._suspects: list[_Gradient] = []  # seen by a backward pass, and perhaps cleared after it
        self._last = -1, True  # the newest committed step, and whether it made an update

    def begin(self) -> None:
        """Record the present gradients at the start of a block, by weak references."""
        self._left = [
            [
                (p, weakref.ref(gradient), writes_of(gradient))
                for p in parameters
                if (gradient := p.grad) is not None
            ]
            for parameters in self._parameters
        ]
        self._suspects = []

    def ended(self, step: int, *, updated: bool) -> None:
        """Record that step ``step`` is committed, and whether it made an update (``updated``)."""
        self._last = step, updated

    def check(self, number: int) -> None:
        """Refuse left-over gradients of one module. Call this when the first backward pass reaches the module's output.

        Args:
            number: index of the module in ``modules``.

        Raises:
            StepError: the module's trained parameters still have gradients of an earlier block.
        """
        left, self._left[number] = self._left[number], []
        kept = _still(left)
        if not kept:
            return
        trained = {id(parameter) for parameter in self._trained()}
        mine = [held for held in kept if id(held[0]) in trained]
        if not _any([p.grad for p, *_ in mine if p.grad is not None]):
            return
        if self._several and (self._last[1] or self._scaled):
            self._suspects += mine
        else:
            self._refuse()

    def updates(self, members: Iterable[torch.Tensor] | None = None) -> None:
        """Refuse an update with gradients of an earlier block that no ``zero_grad`` has removed.

        Args:
            members: parameters of the optimizer that is about to step. None at the vote: gradients of all optimizers
                to which the block has added.

        Raises:
            StepError: a parameter still has such a gradient.
        """
        if not self._suspects:
            return
        still = _still(self._suspects)
        if members is None:
            used = any(p.grad is not None and writes_of(p.grad) != writes for p, _, writes in still)
        else:
            used = not {id(p) for p, *_ in still}.isdisjoint(map(id, members))
        if used:
            self._refuse()

    def _refuse(self) -> NoReturn:
        step, updated = self._last
        made = "leaves the gradients of its update" if updated else "made no update but leaves gradients"
        raise StepError(
            f"step {step} {made}, to which the next step adds: no checkpoint holds them", hint=_ADVICE
        )


def _still(held: Iterable[_Gradient]) -> list[_Gradient]:
    """Return the parameters that still have the recorded gradient."""
    return [each for each in held if each[0].grad is not None and each[0].grad is each[1]()]


def _any(gradients: Iterable[torch.Tensor]) -> bool:
    """Return True if one of the gradients is not zero; waits for each device once."""
    by_device: dict[torch.device, list[torch.Tensor]] = {}
    with torch.no_grad():
        for gradient in gradients:
            values = private_api.sparse_parts(gradient)[1] if gradient.is_sparse else local_of(gradient)
            if values.numel():
                by_device.setdefault(values.device, []).append(values)
        return any(bool(private_api.largest(values).any()) for values in by_device.values())
