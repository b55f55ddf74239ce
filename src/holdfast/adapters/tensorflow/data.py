"""Batches of a ``tf.data.Dataset`` with a position that survives."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import tensorflow as tf

from holdfast.adapters.base import DataIdentity
from holdfast.adapters.values import Plain
from holdfast.errors import EmptyLoaderError, UsageError

Source = Any
"""A dataset, or a function epoch -> dataset (for a shuffle that differs from epoch to epoch)."""


class DatasetFeed:
    """See :class:`holdfast.adapters.base.Feed`.

    Args:
        source: batches of the whole job.
        distribute: makes the batches of this worker out of a dataset.
        on_new: called when a batch has shapes that were not seen before: functions will be traced anew.
    """

    def __init__(self, source: Source, distribute: Callable[[Any], Any], on_new: Callable[[], None]) -> None:
        if not (isinstance(source, tf.data.Dataset) or callable(source)):
            raise UsageError(
                f"the loader is a {type(source).__name__}, not a tf.data.Dataset",
                hint="s.steps(dataset), not yet distributed; or a function epoch -> dataset",
            )
        self.epoch = 0
        self.last_in_epoch = False
        self.repeatable = False
        self.rewinds = True
        self._source = source
        self._distribute = distribute
        self._batch = 0
        self._iterator: Any = None
        self._on_new = on_new
        self._seen: set[tuple[str, ...]] = set()

    def place(self) -> Mapping[str, int]:
        """Epoch and batches drawn in it."""
        return {"epoch": self.epoch, "batch": self._batch}

    def seek(self, place: Mapping[str, int], local: Plain = None) -> None:
        """Go to a position."""
        self.epoch, self._batch = place["epoch"], place["batch"]
        self._iterator = None

    def identity(self) -> DataIdentity | None:
        """None: a pipeline, not a list."""
        return None

    def local_state(self) -> Plain:
        """None: the position is the same on all workers."""
        return None

    def draw(self, epochs: int | None = None) -> Any:
        """The next batch. Raises: StopIteration, EmptyLoaderError."""
        while epochs is None or self.epoch < epochs:
            if self._iterator is None:
                self._iterator = iter(self._distribute(dataset_of(self._source, self.epoch)))
                # Not skip(): a strategy splits batches over the workers, and would count its own smaller ones.
                for _ in range(self._batch):
                    next(self._iterator)
            try:
                batch = next(self._iterator)
            except StopIteration:
                if self._batch == 0:
                    raise EmptyLoaderError(
                        "the dataset yields no batch",
                        hint="is it empty, or smaller than one batch with drop_remainder=True?",
                    ) from None
                self.epoch, self._batch, self._iterator = self.epoch + 1, 0, None
                continue
            self._batch += 1
            shapes = tuple(str(part.shape) for part in tf.nest.flatten(batch, expand_composites=True))
            if shapes not in self._seen:
                self._seen.add(shapes)
                self._on_new()
            return batch
        raise StopIteration

    def close(self) -> None:
        """Drop the iterator."""
        self._iterator = None


def dataset_of(source: Source, epoch: int) -> Any:
    """The dataset of one epoch."""
    return source if isinstance(source, tf.data.Dataset) else source(epoch)
