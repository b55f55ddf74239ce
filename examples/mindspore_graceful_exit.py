"""MindSpore, LeNet-5: one worker learns that its device is failing; all workers save the same step and leave.

    holdfast run --framework mindspore --nproc-per-node 4 examples/mindspore_graceful_exit.py --ask 1@6

Holdfast adds: import holdfast.mindspore; holdfast.mindspore.train(..., exit_file=F) in the place of model.train(...).
Started again, the training continues at the next step. A SIGTERM to any worker, or the `exit` command, ask the same.
"""

import argparse
import json
import os
from pathlib import Path

import mindspore as ms
import mindspore.dataset as ds
import numpy as np
from mindspore import nn
from sklearn.datasets import load_digits

import holdfast.mindspore  # + Holdfast

EXIT_FILE = Path("graceful_exit.json")


def lenet() -> nn.Cell:
    """Build LeNet-5: float32 images (batch, 1, 32, 32) -> logits (batch, 10)."""
    return nn.SequentialCell(
        nn.Conv2d(1, 6, 5, pad_mode="valid"), nn.ReLU(), nn.MaxPool2d(2, 2),
        nn.Conv2d(6, 16, 5, pad_mode="valid"), nn.ReLU(), nn.MaxPool2d(2, 2),
        nn.Flatten(), nn.Dense(400, 120), nn.ReLU(), nn.Dense(120, 84), nn.ReLU(), nn.Dense(84, 10),
    )  # fmt: skip


class Ask(ms.train.Callback):
    """A callback that writes the exit file at a step, as a health monitor does."""

    def __init__(self, spec: str, rank: int) -> None:
        super().__init__()
        asking, _, step = spec.partition("@")
        self.step = int(step) if spec and int(asking) == rank else -1

    def on_train_step_end(self, run_context: ms.train.RunContext) -> None:
        """Write the exit file if this is the step."""
        if run_context.original_args().cur_step_num == self.step:
            EXIT_FILE.write_text(json.dumps({"GracefulExit": 1}))


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--ask", default="", help="RANK@STEP")
    options = parser.parse_args()
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    ms.set_device("CPU")
    ms.set_context(mode=ms.GRAPH_MODE)
    ms.set_seed(1)
    digits = load_digits()
    images = np.kron(digits.images.astype("float32") / 16, np.ones((4, 4), "float32"))[:, None]
    columns = (images, digits.target.astype("int32"))
    data = ds.NumpySlicesDataset(columns, ["image", "label"], num_shards=world, shard_id=rank).batch(32)
    net = lenet()
    loss = nn.SoftmaxCrossEntropyWithLogits(sparse=True, reduction="mean")
    model = ms.Model(net, loss, nn.Momentum(net.trainable_params(), 0.01, 0.9))
    extra = [ms.train.LossMonitor(5), Ask(options.ask, rank)]
    protection = {"checkpoint": "ckpts/", "exit_file": EXIT_FILE, "exit_name": "LeNet"}  # + Holdfast
    holdfast.mindspore.train(model, options.epochs, data, extra, **protection)  # + Holdfast


if __name__ == "__main__":
    main()
