"""TensorFlow, MultiWorkerMirroredStrategy, Keras `fit`: a worker dies; all restart and continue at the next batch.

    holdfast run --framework tensorflow --nproc-per-node 2 examples/tensorflow_resume.py --lose 1@20

Holdfast adds: import holdfast.tensorflow; holdfast.tensorflow.fit(model, ...) in the place of model.fit(...).
No BackupAndRestore, no TF_CONFIG by hand; a damaged newest checkpoint is skipped and named.
"""

import argparse
import os
import signal

os.environ.setdefault("TF_USE_LEGACY_KERAS", "1")  # fit of Keras 3 does not work with several workers

import tensorflow as tf
from sklearn.datasets import load_digits

import holdfast.tensorflow  # + Holdfast

BATCH = 64


def batches(epoch: int) -> tf.data.Dataset:
    """Return the digits, in a new order in each epoch."""
    digits = load_digits()
    data = tf.data.Dataset.from_tensor_slices((digits.data.astype("float32") / 16, digits.target))
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.DATA
    return data.shuffle(2000, seed=epoch).batch(BATCH, drop_remainder=True).with_options(options)


class Lose(tf.keras.callbacks.Callback):
    """A callback that kills this worker at a step, unless this process started there, and prints each step."""

    def __init__(self, spec: str) -> None:
        super().__init__()
        lost, _, step = spec.partition("@")
        self.step = int(step) if spec and lost == os.environ.get("RANK") else -1

    def on_train_begin(self, logs: dict[str, float] | None = None) -> None:
        """Record the step at which this process starts."""
        self.began = int(self.model.optimizer.iterations.numpy())

    def on_train_batch_end(self, batch: int, logs: dict[str, float]) -> None:
        """Print one line, and kill this process if this is the step."""
        step = int(self.model.optimizer.iterations.numpy())
        print(f"step {step} loss {logs['loss']:.4f}", flush=True)
        if step == self.step > self.began + 1:
            os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--lose", default="", help="RANK@STEP")
    arguments = parser.parse_args()
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    tf.keras.utils.set_random_seed(1)
    with strategy.scope():
        layers = tf.keras.layers
        model = tf.keras.Sequential([layers.Input((64,)), layers.Dense(128, "relu"), layers.Dense(10)])
        model.compile("adam", tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    extra = [Lose(arguments.lose)]
    size = {"epochs": arguments.epochs, "steps_per_epoch": len(load_digits().target) // BATCH}
    size["fit_options"] = {"verbose": 0}
    protection = {"strategy": strategy, "checkpoint": "ckpts/", "save_every_steps": 10}  # + Holdfast
    holdfast.tensorflow.fit(model, batches, callbacks=extra, **size, **protection)  # + Holdfast


if __name__ == "__main__":
    main()
