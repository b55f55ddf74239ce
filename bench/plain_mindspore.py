"""The network of examples/mindspore_last_gasp.py as a stock script: MindSpore's group, ModelCheckpoint, resume by hand.

    msrun --worker_num=4 --local_worker_num=4 ... bench/plain_mindspore.py --folder F [--every 20] [--width 256]

Each rank prints `step S T` (Unix time) after each step. For bench/frameworks.py, which kills a worker.
"""

from __future__ import annotations

import argparse
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import mindspore as ms
import mindspore.dataset as ds
from mindspore import nn, ops, train
from mindspore.common.initializer import HeUniform, initializer
from mindspore.communication import get_group_size, get_rank, init
from sklearn.datasets import load_digits


class Network(nn.Cell):  # type: ignore[misc]
    """Five layers, the first a bare weight."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.param = ms.Parameter(initializer(HeUniform(5**0.5), (64, 64)), name="param")
        dense = [nn.Dense(*pair) for pair in pairwise([64, width, width, 64, 10])]
        self.rest = nn.SequentialCell([part for layer in dense for part in (nn.ReLU(), layer)])

    def construct(self, x: Any) -> Any:
        """Compute logits of shape (batch, 10) from float32 images of shape (batch, 64)."""
        return self.rest(ops.matmul(x, self.param))


class Tell(train.Callback):  # type: ignore[misc]
    """A callback that prints when each step was done."""

    def __init__(self, first: int) -> None:
        super().__init__()
        self.done = first

    def on_train_step_end(self, run_context: Any) -> None:
        """Print one line."""
        self.done += 1
        print("step", self.done, time.time(), flush=True)


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--every", type=int, default=20)
    parser.add_argument("--epochs", type=int, default=2000)
    parser.add_argument("--width", type=int, default=256)
    options = parser.parse_args()
    ms.set_device("CPU")
    ms.set_context(mode=ms.GRAPH_MODE)
    ms.set_auto_parallel_context(parallel_mode="data_parallel", gradients_mean=True)
    init()
    rank, world = get_rank(), get_group_size()
    ms.set_seed(1)
    digits = load_digits()
    columns = (digits.data.astype("float32") / 16, digits.target.astype("int32"))
    data = ds.NumpySlicesDataset(columns, ["image", "label"], num_shards=world, shard_id=rank).batch(32)
    net = Network(options.width)
    model = ms.Model(net, nn.CrossEntropyLoss(), nn.Adam(net.trainable_params(), 2e-3))
    own = options.folder / f"ckpt_{rank}"
    saved = sorted(own.glob("*.ckpt"), key=lambda path: path.stat().st_mtime)
    first, batches = 0, data.get_dataset_size()
    if saved:
        epoch, step = (int(word) for word in saved[-1].stem.split("-")[-1].split("_"))
        first = (epoch - 1) * batches + step
        ms.load_param_into_net(model.train_network, ms.load_checkpoint(str(saved[-1])))
        data.set_init_step(first)
    config = train.CheckpointConfig(save_checkpoint_steps=options.every, keep_checkpoint_max=2)
    keep = train.ModelCheckpoint("net", str(own), config)
    model.train(options.epochs, data, callbacks=[keep, Tell(first)], dataset_sink_mode=False,
                initial_epoch=first // batches)  # fmt: skip


if __name__ == "__main__":
    main()
