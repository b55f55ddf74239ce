"""``fit`` with callbacks that count over the epochs and an optimizer that keeps an average, protected or not.

``fit_job.py [--plain]`` prints one line of JSON: what the callbacks saw, and a digest of the final weights.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")

import numpy as np
import tensorflow as tf

import holdfast.tensorflow

BATCHES = 4


class Hooks(tf.keras.callbacks.Callback):  # type: ignore[misc]
    """A callback that records the start and the end of the training, and each epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def on_train_begin(self, logs: Any = None) -> None:
        """Record the start."""
        self.seen.append("begin")

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Record an epoch."""
        self.seen.append(f"epoch {epoch}")

    def on_train_end(self, logs: Any = None) -> None:
        """Record the end."""
        self.seen.append("end")


def main() -> None:
    """Train."""
    tf.keras.utils.set_random_seed(1)
    layers = tf.keras.layers
    model = tf.keras.Sequential([layers.Input((4,)), layers.Dense(1)])
    optimizer = tf.keras.optimizers.SGD(0.05, use_ema=True, ema_momentum=0.5)
    model.compile(optimizer, "mse")
    rng = np.random.default_rng(0)
    pairs = (
        rng.standard_normal((BATCHES * 8, 4)).astype("float32"),
        rng.standard_normal((BATCHES * 8, 1)).astype("float32"),
    )
    data = tf.data.Dataset.from_tensor_slices(pairs).batch(8).repeat()
    hooks = Hooks()
    # No loss improves by this much, so the training stops after three epochs without improvement.
    patient = tf.keras.callbacks.EarlyStopping("loss", min_delta=1e6, patience=3)
    theirs = [hooks, patient, tf.keras.callbacks.CSVLogger("log.csv")]
    if "--plain" in sys.argv:
        model.fit(data, epochs=6, steps_per_epoch=BATCHES, callbacks=theirs, verbose=0)
    else:
        options: dict[str, Any] = {"fit_options": {"verbose": 0}, "checkpoint": "ckpts"}
        holdfast.tensorflow.fit(model, data, epochs=6, steps_per_epoch=BATCHES, callbacks=theirs, **options)
    weights = hashlib.sha256(b"".join(array.tobytes() for array in model.get_weights())).hexdigest()
    seen = {"hooks": hooks.seen, "log": Path("log.csv").read_text(), "weights": weights}
    print(json.dumps(seen), flush=True)


if __name__ == "__main__":
    main()
