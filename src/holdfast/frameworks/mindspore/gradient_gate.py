"""The gate: where gradients pass on their way to the optimizer, inside the compiled graph.

Theory. All gradients become one vector, and one Python operator takes it: it sums the vector over the ranks, votes, and
returns. No weight can change before it returned, because every update needs a piece of what it returns; a fault is
answered inside it (wait, rebuild the connections, sum again), and the graph never learns of it. Moving statistics ride
along: only rank 0's part is not zero, so the sum is rank 0's and all ranks take it when the step ends, as DDP does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mindspore import ParameterTuple, dtype, nn, ops
from numpy.typing import NDArray

Pass = Callable[[NDArray[Any]], NDArray[Any]]
"""float32 [gradients, then buffers] of this rank -> what the optimizer gets."""


class Gate(nn.Cell):  # type: ignore[misc]
    """Gradients (a tuple of tensors) -> gradients of the whole job; in the place of a training cell's ``grad_reducer``.

    Args:
        through: called with the vector, in whatever thread executes the graph.
        buffers: parameters that ride along.
        before: what reduced the gradients so far, called first.
    """

    def __init__(self, through: Pass, buffers: list[Any], before: Any) -> None:
        super().__init__(auto_prefix=False)
        self.through = ops.Custom(through, _same, _same, func_type="pyfunc")
        self.join = ops.Concat(0)
        self.cast = ops.Cast()
        self.buffers = ParameterTuple(buffers)
        self.before = before

    def construct(self, grads: Any) -> Any:
        """Compiled: no Python runs here in GRAPH mode."""
        grads = self.before(grads)
        flat: Any = ()
        for grad in grads:
            flat += (self.cast(grad.reshape(-1), dtype.float32),)
        for buffer in self.buffers:
            flat += (self.cast(buffer.reshape(-1), dtype.float32),)
        whole = self.through(self.join(flat))
        start = 0
        out: Any = ()
        for grad in grads:
            size = grad.size
            out += (self.cast(whole[start : start + size].reshape(grad.shape), grad.dtype),)
            start += size
        return out


class Relay(nn.Cell):  # type: ignore[misc]
    """A place for a gate inside a wrapped optimizer; passes gradients until one is put there."""

    def __init__(self) -> None:
        super().__init__(auto_prefix=False)
        self.grad_reducer = nn.Identity()

    def construct(self, grads: Any) -> Any:
        """Compiled."""
        return self.grad_reducer(grads)


def _same(value: Any) -> Any:
    return value
