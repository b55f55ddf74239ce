"""The run of one step in parts, so that a job that lost nodes continues with fewer ranks and the same batch per step.

Theory. A rank that does the work of ``parts`` ranks runs the block of a step once per part, each time with the next
batch. Every block except the last stops where it would vote. The rank then restores its state as after an aborted step,
but keeps the gradients. In the last block the optimizer must get the mean over all parts. So each ``backward`` call
starts from the gradient 1 / parts instead of 1, and the first ``backward`` call of the last part adds the gradients of
the earlier parts. After that call, user code (unscaling, clipping, a gradient norm) sees the gradient of the whole
batch. Wrappers that sum and divide by the number of ranks do so within each part. The added gradients are equal on all
ranks that share a gradient, so a mean over these ranks does not change them.
The sum is the same as before the loss of nodes, except for the order of additions. A part uses the random numbers of
the rank whose work it does. Running statistics (BatchNorm) are computed from the last part only.

Invariants:
1. A call of ``begin(part)`` with ``part > 0`` means that the previous part has ended normally. Only then are the
   gradients of the previous part added to the sum.
2. A rank never votes for a step before the gradients of all its parts are added.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from holdfast.errors import UnsupportedError
from holdfast.frameworks.torch import private_api


class ElasticAccumulation:
    """The sum of the gradients of one step over the parts of the step.

    Args:
        parameters: the parameters of the model, by name.
    """

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        self.part = 0
        self._parts = 1
        self._parameters = parameters
        self._sums: dict[str, Tensor] = {}
        self._last: dict[str, Tensor] = {}  # gradients of the current part
        self._added = False
        self._active = False
        self._original: Callable[..., None] | None = None

    def begin(self, part: int, parts: int) -> None:
        """Begin the block of part ``part`` (from 0) of ``parts``; add the gradients of the previous part to the sum."""
        if self._original is None:
            self._original = torch.autograd.backward
            torch.autograd.backward = self._backward
        if part == 0:
            self._sums = {}
        for name, gradient in self._last.items() if part else ():
            known = self._sums.get(name)
            self._sums[name] = gradient if known is None else known.add_(gradient)
        self.part, self._parts = part, parts
        self._last = {}
        self._added = False
        self._active = parts > 1

    def end(self) -> None:
        """End the current part: later backward passes belong to no part."""
        self._active = False

    def check(self) -> None:
        """Check before the vote that the gradients of all parts were added.

        Raises:
            UnsupportedError: the block computed its gradients in a way that does not work in parts.
        """
        if self._active and self._sums and not self._added:
            raise UnsupportedError(
                "the gradients of this step were not computed by backward(): it cannot be run in parts by fewer ranks",
                hint="start without --shrink-to",
            )

    def close(self) -> None:
        """Restore torch's own ``torch.autograd.backward``."""
        if self._original is not None:
            torch.autograd.backward = self._original
            self._original = None

    @private_api.untraced  # the script may compile its whole step
    def _backward(self, tensors: Any, grad_tensors: Any = None, *args: Any, **kwargs: Any) -> None:
        assert self._original is not None
        if not self._active:
            self._original(tensors, grad_tensors, *args, **kwargs)
            return
        self._original(tensors, self._roots(tensors, grad_tensors, kwargs), *args, **kwargs)
        if self.part + 1 < self._parts:
            # After several backward passes in a part (accumulation), the gradient is that of all of them.
            self._last = {n: p.grad.clone() for n, p in self._parameters.items() if p.grad is not None}
        elif not self._added:
            self._added = True
            self._add()

    def _roots(self, tensors: Any, grad_tensors: Any, kwargs: Mapping[str, Any]) -> Any:
        if grad_tensors is not None or kwargs.get("grad_variables") is not None:
            raise UnsupportedError(
                "backward() with a gradient of its own cannot be run in parts by fewer ranks (a pipeline does this)",
                hint="start without --shrink-to",
            )
        roots = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        if not all(isinstance(root, Tensor) and root.numel() == 1 for root in roots):
            return None  # torch reports the error
        return [torch.full_like(root, 1.0 / self._parts) for root in roots]

    def _add(self) -> None:
        for name, gradient in self._sums.items():
            parameter = self._parameters[name]
            if parameter.grad is None:
                parameter.grad = gradient.clone()
            else:
                parameter.grad.add_(gradient)
