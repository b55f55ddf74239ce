"""A MindSpore training that computes denormal numbers in the script's thread, before the session and in it.

Each rank prints how often the number was not flushed to zero, before the session and during its steps.
"""

from __future__ import annotations

import os
from typing import Any

import mindspore as ms
import mindspore.dataset as ds
import numpy as np
from mindspore import nn, ops

import holdfast.mindspore

RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
STEPS = 3
RUNS = 3
"""Of a graph as small as this one, MindSpore executes the first in its pool and the others in the calling thread."""

SMALL = ms.Tensor(np.full(64, 1.2e-38, np.float32))


class Halved(nn.Cell):  # type: ignore[misc]
    """A cell that halves its parameter, which then is below the smallest normal number."""

    def __init__(self) -> None:
        super().__init__()
        self.value = ms.Parameter(SMALL, name="value")
        self.assign = ops.Assign()

    def construct(self, factor: Any) -> Any:
        """Multiply the parameter by ``factor``."""
        self.assign(self.value, self.value * factor)
        return factor

    def kept(self) -> int:
        """Return how many runs did not flush the result to zero."""
        found = 0
        for _ in range(RUNS):
            ops.assign(self.value, SMALL)
            self(ms.Tensor(np.float32(0.5)))
            found += bool(self.value.asnumpy().any())
        return found


class Watch(ms.train.Callback):  # type: ignore[misc]
    """A callback that counts unflushed results in each step."""

    def __init__(self, halved: Halved) -> None:
        self.halved = halved
        self.kept = 0

    def on_train_step_end(self, run_context: Any) -> None:
        """Count the results of this step."""
        self.kept += self.halved.kept()


def main() -> None:
    """Train."""
    ms.set_device("CPU")
    ms.set_context(mode=ms.GRAPH_MODE)
    x = np.random.default_rng(0).standard_normal((STEPS * WORLD, 4)).astype(np.float32)
    data = ds.NumpySlicesDataset((x, x[:, :1].copy()), ["x", "y"], num_shards=WORLD, shard_id=RANK).batch(1)
    net = nn.Dense(4, 1, ms.Tensor(np.ones((1, 4), np.float32)), "zeros")
    model = ms.Model(net, nn.MSELoss(), nn.Momentum(net.trainable_params(), 0.01, 0.9))
    watch = Watch(Halved())
    before = watch.halved.kept()
    holdfast.mindspore.train(model, 1, data, callbacks=[watch])
    print(f"kept before {before}, in the session {watch.kept}", flush=True)


if __name__ == "__main__":
    main()
