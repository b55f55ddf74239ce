"""One step of SGD on ``w``, of which each rank holds a slice, and on ``v``, which all ranks hold. Prints both.

``python slices_job.py [undeclared] [sum] [native] [halves]``. ``undeclared``: do not declare the slice. ``sum``:
``gradients_mean=False``. ``native``: MindSpore's own AllReduce. ``halves``: two ranks hold each slice.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn, ops

import holdfast.mindspore
from holdfast.mindspore import Slice

OPTIONS = frozenset(sys.argv[1:])


class Net(nn.Cell):  # type: ignore[misc]
    """A model with the loss x * (sum of w and of v), so that each gradient is x."""

    def __init__(self) -> None:
        super().__init__()
        zeros = np.zeros(4, np.float32)
        self.w = Parameter(Tensor(zeros), name="w", layerwise_parallel=True)
        self.v = Parameter(Tensor(zeros), name="v")

    def construct(self, x: Any) -> Any:
        """Return the loss."""
        return ops.reduce_sum(self.w * x) + ops.reduce_sum(self.v * x)


def main() -> None:
    """Train one step; the gradient of rank r is r + 1."""
    ms.set_device("CPU")
    ms.set_context(mode=ms.GRAPH_MODE)
    if "native" in OPTIONS:
        from mindspore.communication import init

        init()
        ms.set_auto_parallel_context(parallel_mode="data_parallel", gradients_mean=True)
    if "sum" in OPTIONS:
        ms.set_auto_parallel_context(gradients_mean=False)
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    parts = 2 if "halves" in OPTIONS else world
    net = Net()
    cell = nn.TrainOneStepCell(net, nn.SGD(net.trainable_params(), 1.0))
    slices = {} if "undeclared" in OPTIONS else {"w": Slice((4 * parts,), (4 * (rank % parts),))}
    with holdfast.mindspore.session(cell, slices=slices, checkpoint="ckpts") as s:
        for step in s.steps(until=1):
            with step:
                cell(Tensor(np.float32(rank + 1)))
    print(f"rank {rank} w {net.w.asnumpy()[0]:g} v {net.v.asnumpy()[0]:g}", flush=True)


if __name__ == "__main__":
    main()
