"""A typical MindSpore training: no seed, random crops and flips, shuffles. Its result is the list of trained samples.

``python exact_job.py [crop] [shuffle] [random] [broadcast] [differ] [names] [draws]``. ``crop``: random crops and
flips. ``shuffle``: a shuffle after the sharding. ``random``: weights that each rank draws. ``broadcast``:
``parameter_broadcast=True``. ``differ``: another value in one copy at step 4. ``names``: print the samples of each
step. ``draws``: a Python function that draws random numbers.
``JOB_DIE`` and ``JOB_TERM`` (RANK@STEP): how a rank ends, once.
"""

from __future__ import annotations

import hashlib
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import mindspore as ms
import mindspore.dataset as ds
import numpy as np
from mindspore import nn, ops
from mindspore.dataset import vision

import holdfast.mindspore

OPTIONS = frozenset(sys.argv[1:])
RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
SAMPLES = 64
EPOCHS = 2


class Watch(ms.train.Callback):  # type: ignore[misc]
    """A callback that injects faults and prints a line for each step."""

    def on_train_step_begin(self, run_context: Any) -> None:
        """Print the samples of the next step, and change a copy if requested."""
        about = run_context.original_args()
        if "names" in OPTIONS:
            numbers = about.train_dataset_element[1].asnumpy().reshape(-1).tolist()
            print(f"seen {about.cur_step_num} {numbers}", flush=True)
        if "differ" in OPTIONS and RANK == 1 and about.cur_step_num == 4:
            weight = next(iter(about.train_network.get_parameters()))
            ops.assign(weight, ms.Tensor(weight.asnumpy() + np.float32(1)))

    def on_train_step_end(self, run_context: Any) -> None:
        """Print the step, kill this process if this is its fault, and wait so that a kill can hit the step."""
        step = run_context.original_args().cur_step_num
        print("step", step, flush=True)
        for variable, number in (("JOB_DIE", signal.SIGKILL), ("JOB_TERM", signal.SIGTERM)):
            struck = Path(os.environ.get("HOLDFAST_RUN_DIR", ".")) / f"{variable}-struck"
            if os.environ.get(variable) == f"{RANK}@{step}" and not struck.exists():
                struck.touch()
                os.kill(os.getpid(), number)
        time.sleep(0.02)


def batches() -> Any:
    """Return 8 numbered samples per step for all ranks."""
    rng = np.random.default_rng(0)
    images = rng.integers(0, 255, (SAMPLES, 8, 8, 3), np.uint8)
    numbers = np.arange(SAMPLES, dtype=np.int32)
    data = ds.NumpySlicesDataset(
        (images, numbers), ["image", "number"], shuffle=True, num_shards=WORLD, shard_id=RANK
    )
    if "crop" in OPTIONS:
        crops = [vision.RandomCrop((8, 8), (2, 2, 2, 2)), vision.RandomHorizontalFlip()]
        data = data.map(crops, "image", num_parallel_workers=2)
    if "draws" in OPTIONS:
        data = data.map(lambda image: image + np.random.randint(0, 2, image.shape).astype(np.uint8), "image")
    data = data.map([vision.Rescale(1 / 255.0, 0.0), vision.HWC2CHW()], "image")
    if "shuffle" in OPTIONS:
        data = data.shuffle(8)
    return data.batch(int(os.environ.get("JOB_BATCH", 8 // WORLD)), drop_remainder=True)


def main() -> None:
    """Train."""
    ms.set_device("CPU")
    ms.set_context(mode=ms.GRAPH_MODE)
    if "broadcast" in OPTIONS:
        ms.set_auto_parallel_context(parameter_broadcast=True)
    rng = np.random.default_rng(1)
    weights = [
        "normal" if "random" in OPTIONS else ms.Tensor(rng.standard_normal(shape).astype(np.float32) * 0.1)
        for shape in ((16, 192), (64, 16))
    ]
    net = nn.SequentialCell(
        nn.Flatten(),
        nn.Dense(192, 16, weights[0], "zeros"),
        nn.ReLU(),
        nn.Dense(16, SAMPLES, weights[1], "zeros"),
    )
    loss = nn.SoftmaxCrossEntropyWithLogits(sparse=True, reduction="mean")
    model = ms.train.Model(net, loss, nn.Momentum(net.trainable_params(), 0.01, 0.9))
    holdfast.mindspore.train(
        model, EPOCHS, batches(), callbacks=[Watch()], checkpoint=os.environ.get("JOB_CHECKPOINT")
    )
    whole = b"".join(p.asnumpy().tobytes() for p in model.train_network.get_parameters())
    print("digest", hashlib.sha256(whole).hexdigest()[:16], flush=True)


if __name__ == "__main__":
    main()
