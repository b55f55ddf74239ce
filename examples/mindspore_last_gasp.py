"""MindSpore, five layers, data parallel (what MindIO TTP's example trains): a worker is lost, no step is.

    holdfast run --framework mindspore --nproc-per-node 4 examples/mindspore_last_gasp.py --lose 2@20

Holdfast adds: import holdfast.mindspore; holdfast.mindspore.train(model, ...) in the place of model.train(...).
No OptTFTWrapper, no TFTRegister, no controller on rank 0, no epoch or step edited for the next start.
"""

import argparse
import os
import signal
from itertools import pairwise

import mindspore as ms
import mindspore.dataset as ds
from mindspore import nn, ops
from mindspore.common.initializer import HeUniform, initializer
from sklearn.datasets import load_digits

import holdfast.mindspore  # + Holdfast


class Network(nn.Cell):
    """Five layers, the first a bare weight."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.param = ms.Parameter(initializer(HeUniform(5**0.5), (64, 64)), name="param")
        sizes = [64, width, width, 64, 10]
        dense = [nn.Dense(*pair) for pair in pairwise(sizes)]
        self.rest = nn.SequentialCell([part for layer in dense for part in (nn.ReLU(), layer)])

    def construct(self, x: ms.Tensor) -> ms.Tensor:
        """Compute logits (batch, 10) from float32 images (batch, 64)."""
        return self.rest(ops.matmul(x, self.param))


class Lose(ms.train.Callback):
    """A callback that kills this worker at a step, unless this process started there."""

    def __init__(self, spec: str, rank: int) -> None:
        super().__init__()
        lost, _, step = spec.partition("@")
        self.step = int(step) if spec and int(lost) == rank else -1

    def on_train_begin(self, run_context: ms.train.RunContext) -> None:
        """Record the step at which this process starts."""
        self.began = run_context.original_args().cur_step_num

    def on_train_step_begin(self, run_context: ms.train.RunContext) -> None:
        """Kill this process if this is the step."""
        if run_context.original_args().cur_step_num == self.step > self.began + 1:
            os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--lose", default="", help="RANK@STEP")
    options = parser.parse_args()
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    ms.set_device("CPU")
    ms.set_context(mode=ms.GRAPH_MODE)
    ms.set_seed(1)
    digits = load_digits()
    columns = (digits.data.astype("float32") / 16, digits.target.astype("int32"))
    data = ds.NumpySlicesDataset(columns, ["image", "label"], num_shards=world, shard_id=rank).batch(32)
    net = Network(options.width)
    model = ms.Model(net, nn.CrossEntropyLoss(), nn.Adam(net.trainable_params(), 2e-3))
    extra = [ms.train.LossMonitor(5), Lose(options.lose, rank)]
    holdfast.mindspore.train(model, options.epochs, data, callbacks=extra)  # + Holdfast


if __name__ == "__main__":
    main()
