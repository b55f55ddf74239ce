"""A TensorFlow training that changes its learning rate and its own state outside of its blocks; see ``changes.py``."""

from __future__ import annotations

import hashlib
import os
import sys
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")

import numpy as np
import tensorflow as tf

import holdfast.tensorflow
from holdfast.frameworks.tensorflow.adapter import place
from tests.frameworks.changes import EPOCH_STEPS, Changes

BATCH = 16


def batches(epoch: int) -> Any:
    """Return the batches of one epoch."""
    x = np.random.default_rng(epoch).standard_normal((EPOCH_STEPS * BATCH, 8)).astype("float32")
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.DATA
    return tf.data.Dataset.from_tensor_slices((x, x[:, :1].copy())).batch(BATCH).with_options(options)


class Job:
    """Model, data and the changes of one run."""

    def __init__(self) -> None:
        self.strategy = tf.distribute.MultiWorkerMirroredStrategy()
        tf.keras.utils.set_random_seed(1)
        with self.strategy.scope():
            layers = tf.keras.layers
            self.model = tf.keras.Sequential(
                [layers.Input((8,)), layers.Dense(16, name="first"), layers.BatchNormalization(name="norm"),
                 layers.Dense(1, name="last")]
            )  # fmt: skip
            self.model.compile(tf.keras.optimizers.Adam(0.01), "mse")
            self.average = tf.Variable(tf.zeros((8, 16)), name="average")
        self.changes = Changes(place()[0], self.average)
        self.train = self._train_step()

    def _train_step(self) -> Any:
        model, strategy = self.model, self.strategy
        loss = tf.keras.losses.MeanSquaredError(reduction="none")

        @tf.function  # type: ignore[untyped-decorator]
        def train_step(batch: Any) -> Any:
            def each(x: Any, y: Any) -> Any:
                with tf.GradientTape() as tape:
                    value = tf.nn.compute_average_loss(
                        loss(y, model(x, training=True)), global_batch_size=BATCH
                    )
                gradients = tape.gradient(value, model.trainable_variables)
                model.optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
                return value

            return strategy.reduce(tf.distribute.ReduceOp.SUM, strategy.run(each, args=batch), axis=None)

        return train_step

    def change(self, step: int) -> None:
        """Advance the schedule and update the average."""
        self.changes.made(step)
        self.model.optimizer.learning_rate = float(self.model.optimizer.learning_rate.numpy()) / 2
        weight = self.model.get_layer("first").kernel.numpy()
        self.average.assign((self.average.numpy() + weight) / 2)

    def digest(self) -> str:
        """Return a digest of all variables."""
        from holdfast.frameworks.tensorflow.state import TensorFlowState

        state = TensorFlowState(self.model, self.model.optimizer, {})
        state.take()
        whole = b"".join(array.tobytes() for _, array in sorted(state.copies.items()))
        return hashlib.sha256(whole).hexdigest()[:16]


def main() -> None:
    """Train."""
    job = Job()
    changes = job.changes
    save = {"save_every_steps": 6} if "save" in sys.argv else {}  # one save only, so that no save has to wait
    arguments: dict[str, Any] = {"checkpoint": "ckpts", "state": changes.state, **save}
    with holdfast.tensorflow.session(job.model, strategy=job.strategy, **arguments) as s:
        changes.loops(
            s,
            lambda until: s.steps(batches, until=until),
            lambda step: changes.learn(step, job.train, job.change),
            job.change,
        )
        if not s.exiting:
            rate = float(job.model.optimizer.learning_rate.numpy())
            changes.told(job.digest(), float(job.average.numpy().sum()), rate)


if __name__ == "__main__":
    main()
