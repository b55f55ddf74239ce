"""TensorFlow without ``holdfast run``: one of several processes never trains alone."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.frameworks.launched import BOUND_S

SCRIPT = """\
import tensorflow as tf
import holdfast.tensorflow
strategy = tf.distribute.MultiWorkerMirroredStrategy()
with strategy.scope():
    model = tf.keras.Sequential([tf.keras.layers.Input((2,)), tf.keras.layers.Dense(1)])
    optimizer = tf.keras.optimizers.SGD()
with holdfast.tensorflow.session(model, optimizer, strategy=strategy, checkpoint="ckpts") as s:
    print("trains")
"""


@pytest.mark.parametrize(
    ("env", "words"),
    [
        (
            {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"},
            ("UsageError: 2 processes were started, but the strategy knows 1 worker", "TF_CONFIG"),
        ),
        ({"RANK_ID": "0"}, ("UsageError: RANK_ID=0", "RANK_SIZE is not set")),
    ],
    ids=["mpirun without TF_CONFIG", "half"],
)
def test_one_of_several_never_trains_alone(
    tmp_path: Path, env: dict[str, str], words: tuple[str, ...]
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], env={**os.environ, **env}, cwd=tmp_path, capture_output=True, text=True,
        timeout=BOUND_S, check=False,
    )  # fmt: skip
    assert done.returncode != 0 and "trains" not in done.stdout
    assert all(word in done.stderr for word in words), done.stderr
