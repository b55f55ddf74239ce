"""A small TensorFlow training with shuffling and BatchNorm. Its result is the digest of its variables.

``python job.py loop|fit``: a custom loop with Keras 3, or ``fit`` (needs TF_USE_LEGACY_KERAS=1).
``JOB_DIFFER`` (RANK@STEP): after this step of the loop one worker holds another weight.
"""

from __future__ import annotations

import hashlib
import os
import sys
import time
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")

import numpy as np
import tensorflow as tf

import holdfast.tensorflow
from holdfast.frameworks.tensorflow.state import _components, assign

EPOCH_STEPS = 8
EPOCHS = 4
BATCH = 32


def batches(epoch: int) -> Any:
    """Return the batches of an epoch, shuffled again in each epoch."""
    rng = np.random.default_rng(epoch)
    x = rng.standard_normal((EPOCH_STEPS * BATCH, 8)).astype("float32")
    data = tf.data.Dataset.from_tensor_slices((x, x[:, :1].copy())).shuffle(1000, seed=epoch).batch(BATCH)
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.DATA
    return data.with_options(options)


def say(step: int) -> None:
    """Print one line per step, slowly enough to be hit by a kill."""
    print("step", step, flush=True)
    time.sleep(0.05)


def loop(strategy: Any, model: Any, options: dict[str, Any]) -> None:
    """Train with a custom loop."""
    loss = tf.keras.losses.MeanSquaredError(reduction="none")

    @tf.function  # type: ignore[untyped-decorator]
    def train_step(batch: Any) -> Any:
        def each(x: Any, y: Any) -> Any:
            with tf.GradientTape() as tape:
                value = tf.nn.compute_average_loss(loss(y, model(x, training=True)), global_batch_size=BATCH)
            gradients = tape.gradient(value, model.trainable_variables)
            model.optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
            return value

        return strategy.reduce(tf.distribute.ReduceOp.SUM, strategy.run(each, args=batch), axis=None)

    with holdfast.tensorflow.session(model, strategy=strategy, **options) as s:
        for step in s.steps(batches, epochs=EPOCHS):
            with step as batch:
                train_step(batch)
            if step.committed:
                say(s.step)
                if os.environ.get("JOB_DIFFER") == f"{os.environ['RANK']}@{s.step}":
                    weight = model.trainable_variables[0]
                    assign(weight, np.asarray(_components(weight)[0].numpy()) + np.float32(1))


class Watch(tf.keras.callbacks.Callback):  # type: ignore[misc]
    """A callback that prints each step of ``fit``."""

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Print the step."""
        say(int(self.model.optimizer.iterations.numpy()))


def main() -> None:
    """Train."""
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    tf.keras.utils.set_random_seed(1)
    with strategy.scope():
        layers = tf.keras.layers
        model = tf.keras.Sequential(
            [
                layers.Input((8,)),
                layers.Dense(32, activation="relu", name="first"),
                layers.BatchNormalization(name="norm"),
                layers.Dense(1, name="last"),
            ]
        )
        model.compile(tf.keras.optimizers.Adam(0.01), "mse")
    options: dict[str, Any] = {
        "checkpoint": os.environ.get("JOB_CHECKPOINT"),
        "exit_file": "graceful_exit.json",
    }
    options["save_every_steps"] = int(os.environ.get("JOB_SAVE_EVERY", "0")) or None
    if sys.argv[1] == "loop":
        loop(strategy, model, options)
    else:
        holdfast.tensorflow.fit(
            model,
            batches,
            epochs=EPOCHS,
            steps_per_epoch=EPOCH_STEPS,
            callbacks=[Watch(), tf.keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.5)],
            strategy=strategy,
            fit_options={"verbose": 0},
            **options,
        )
    from holdfast.frameworks.tensorflow.state import TensorFlowState

    state = TensorFlowState(model, model.optimizer, {})
    whole = b"".join(array.tobytes() for _, array in sorted(state.copies.items()))
    print("digest", hashlib.sha256(whole).hexdigest()[:16], flush=True)


if __name__ == "__main__":
    main()
