"""A pipeline that draws different batches from each new iterator is refused by name."""

from __future__ import annotations

import os

import pytest

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")

import tensorflow as tf

from holdfast.errors import UnsupportedError
from holdfast.frameworks.tensorflow.data_position import DatasetFeed, Source

NUMBERS = tf.data.Dataset.range(20)


def noise(x: tf.Tensor, seed: int | None = None) -> tf.Tensor:
    """Add noise from a random operation with its own state."""
    return x + tf.random.uniform((), 0, 100, tf.int64, seed=seed)


def drawn(source: Source, first: int) -> list[int]:
    """Return the values after ``first`` batches, in a process that begins there."""
    feed = DatasetFeed(source, lambda dataset: dataset, lambda: None)
    feed.seek({"epoch": 0, "batch": first})
    return [int(feed.draw()) for _ in range(20 - first)]


@pytest.mark.parametrize(
    ("source", "why"),
    [
        (NUMBERS.shuffle(5), "shuffle\\(\\) without a seed"),
        (lambda epoch: NUMBERS.shuffle(5), "shuffle\\(\\) without a seed"),
        (NUMBERS.shuffle(5, seed=1).map(lambda x: x), "one dataset for all epochs"),
        (NUMBERS.map(noise), "RandomUniformInt, without a seed"),
        (lambda epoch: NUMBERS.map(lambda x: noise(x, 4), num_parallel_calls=2), "in parallel calls"),
    ],
)
def test_refused(source: Source, why: str) -> None:
    with pytest.raises(UnsupportedError, match=why):
        drawn(source, 0)


@pytest.mark.parametrize(
    "source",
    [
        NUMBERS.shuffle(5, seed=1, reshuffle_each_iteration=False),
        lambda epoch: NUMBERS.shuffle(5, seed=epoch),
        NUMBERS.map(lambda x: noise(x, 4)),
    ],
)
def test_the_same_from_any_place(source: Source) -> None:
    assert drawn(source, 7) == drawn(source, 0)[7:]
