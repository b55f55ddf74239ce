"""A small framework in NumPy, without Holdfast: a linear model, its gradients and its optimizer.

An adapter needs three hooks from a framework: to average the gradients of all processes, and to run code before and
after the optimizer changes weights.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


class Model:
    """The linear model ``y = x @ w + b``. ``weights``: w of shape [inputs], b of shape [1]."""

    def __init__(self, inputs: int, seed: int = 0) -> None:
        draw = np.random.default_rng(seed)
        self.weights: dict[str, Array] = {"w": draw.normal(size=inputs), "b": np.zeros(1)}

    def gradients(self, x: Array, y: Array) -> dict[str, Array]:
        """Return the gradients of the squared error. Shapes: x [rows, inputs], y [rows]."""
        error = x @ self.weights["w"] + self.weights["b"] - y
        return {"w": x.T @ error / len(y), "b": np.array([error.mean()])}


class Momentum:
    """Stochastic gradient descent with momentum."""

    def __init__(self, model: Model, rate: float, momentum: float = 0.9) -> None:
        self.model = model
        self.velocity = {name: np.zeros_like(array) for name, array in model.weights.items()}
        self.average: Callable[[Array], Array] = lambda gradient: (
            gradient
        )  # hook: the mean over all processes
        self.before: Callable[[], None] = lambda: None
        self.after: Callable[[], None] = lambda: None
        self._rate, self._momentum = rate, momentum

    def step(self, gradients: Mapping[str, Array]) -> None:
        """Average the gradients and change the weights."""
        means = {name: self.average(gradient) for name, gradient in sorted(gradients.items())}
        self.before()
        for name, mean in means.items():
            self.velocity[name][:] = self._momentum * self.velocity[name] + mean
            self.model.weights[name] -= self._rate * self.velocity[name]
        self.after()


class Table:
    """The rows to train on, in batches of ``rows_per_batch``. Shapes: x [rows, inputs], y [rows]."""

    def __init__(self, x: Array, y: Array, rows_per_batch: int) -> None:
        self.x, self.y, self.rows_per_batch = x, y, rows_per_batch

    def batch(self, epoch: int, number: int) -> tuple[Array, Array] | None:
        """Return a batch of the shuffled rows of an epoch; None after the last one."""
        order = np.random.default_rng(epoch).permutation(len(self.y))
        rows = order[number * self.rows_per_batch : (number + 1) * self.rows_per_batch]
        return (self.x[rows], self.y[rows]) if len(rows) == self.rows_per_batch else None
