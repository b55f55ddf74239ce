"""The gate: the operator in the compiled graph through which all gradients pass to the optimizer.

Theory. All gradients become one vector, and one Python operator takes it: it sums the vector over the ranks, votes, and
returns. No weight can change before its return, because every update needs a piece of the result. A fault is handled
inside the operator (wait, rebuild the connections, sum again), and the graph does not notice it. Moving statistics
travel in the same vector. Only rank 0's part of them is not zero, so their sum equals rank 0's values. When the step
ends, all ranks set their moving statistics to this sum, as DDP does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mindspore import ParameterTuple, dtype, nn, ops
from numpy.typing import NDArray

Pass = Callable[[NDArray[Any]], NDArray[Any]]
"""A function of this rank's float32 vector [gradients, then buffers]. It returns the optimizer's vector."""


class Gate(nn.Cell):  # type: ignore[misc]
    """A cell that replaces this rank's gradients by the sums over the job. It takes the place of ``grad_reducer``.

    Args:
        through: called with the vector of gradients and buffers, in the thread that executes the graph.
        buffers: parameters that travel with the gradients.
        before: the previous ``grad_reducer``, called first.
    """

    def __init__(self, through: Pass, buffers: list[Any], before: Any) -> None:
        super().__init__(auto_prefix=False)
        self.through = ops.Custom(through, _same, _same, func_type="pyfunc")
        self.join = ops.Concat(0)
        self.cast = ops.Cast()
        self.buffers = ParameterTuple(buffers)
        self.before = before

    def construct(self, grads: Any) -> Any:
        """Return the job's gradients. MindSpore compiles this method: in GRAPH mode no Python runs here."""
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
    """A cell inside a wrapped optimizer, into which a gate can be put. Without a gate the gradients pass unchanged."""

    def __init__(self) -> None:
        super().__init__(auto_prefix=False)
        self.grad_reducer = nn.Identity()

    def construct(self, grads: Any) -> Any:
        """Return the gradients after the gate. MindSpore compiles this method."""
        return self.grad_reducer(grads)


def _same(value: Any) -> Any:
    return value
