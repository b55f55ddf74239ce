"""The position of the job in a ``tf.data.Dataset``, which survives a restart.

Theory. A position is an epoch and the number of batches drawn in it. A process that starts again makes a new iterator
and draws up to the position. That gives the same batches only if each new iterator of the pipeline yields the same
batches. Two kinds of pipelines do not, and are refused by name: an order or an augmentation without a seed, and a
shuffle that TensorFlow changes from iterator to iterator.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import tensorflow as tf

from holdfast.errors import EmptyLoaderError, UnsupportedError, UsageError
from holdfast.frameworks.common.adapter import DataIdentity
from holdfast.frameworks.common.state_tree import Plain

Source = Any
"""A dataset, or a function epoch -> dataset (for a shuffle that differs from epoch to epoch)."""


class DatasetFeed:
    """The batches of a ``tf.data.Dataset``; see :class:`holdfast.frameworks.common.adapter.Feed`.

    Args:
        source: batches of the whole job.
        distribute: makes the batches of this worker out of a dataset.
        on_new: called when an iterator is made, and at a batch with new shapes, for which functions are traced again.
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
        """Return the position: the epoch and the number of batches drawn in it."""
        return {"epoch": self.epoch, "batch": self._batch}

    def seek(self, place: Mapping[str, int], local: Plain = None) -> None:
        """Move to the position ``place``. ``local`` is not used."""
        self.epoch, self._batch = place["epoch"], place["batch"]
        self._iterator = None

    def identity(self) -> DataIdentity | None:
        """Return None: the content of a pipeline is not known."""
        return None

    def local_state(self) -> Plain:
        """Return None: the position is the same on all workers."""
        return None

    def draw(self, epochs: int | None = None) -> Any:
        """Return the next batch.

        Raises: StopIteration: ``epochs`` epochs are over; EmptyLoaderError: there is no batch.
        """
        while epochs is None or self.epoch < epochs:
            if self._iterator is None:
                self._on_new()  # the iterator is built and drawn up to the position: slow, but no hang
                self._iterator = iter(self._distribute(dataset_of(self._source, self.epoch)))
                # Not skip(): a strategy splits batches over the workers, so skip() would count its smaller batches.
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
        """Discard the iterator."""
        self._iterator = None


def dataset_of(source: Source, epoch: int) -> Any:
    """Return the dataset of one epoch. Raises: UnsupportedError: its iterators would draw different batches."""
    fixed = isinstance(source, tf.data.Dataset)
    dataset = source if fixed else source(epoch)
    for part in _parts(dataset):
        _refuse_shuffle(part, fixed=fixed)
        _refuse_random(part)
    return dataset


def _parts(dataset: Any) -> Iterator[Any]:
    """Yield the dataset and all datasets that it draws from, if TensorFlow gives access to them."""
    yield dataset
    for below in getattr(dataset, "_inputs", tuple)():
        yield from _parts(below)


def _refuse_shuffle(part: Any, *, fixed: bool) -> None:
    """Refuse a shuffle whose order differs between processes.

    Args:
        part: a dataset of the pipeline.
        fixed: True if the same dataset serves all epochs.

    Raises:
        UnsupportedError: ``part`` is such a shuffle.
    """
    if not hasattr(part, "_reshuffle_each_iteration"):
        return
    if int(part._seed) == 0 and int(part._seed2) == 0:
        raise UnsupportedError(
            "shuffle() without a seed gives another order to a process that begins again: samples would be trained "
            "twice, others never",
            hint="a function epoch -> dataset, with shuffle(size, seed=epoch)",
        )
    if fixed and part._reshuffle_each_iteration:
        raise UnsupportedError(
            "shuffle() of one dataset for all epochs: its order depends on how many epochs this process has begun",
            hint="a function epoch -> dataset, with shuffle(size, seed=epoch); or reshuffle_each_iteration=False",
        )


def _refuse_random(part: Any) -> None:
    """Refuse a map with random operations whose random numbers differ between processes. Raises: UnsupportedError."""
    graph = getattr(getattr(getattr(part, "_map_func", None), "function", None), "graph", None)
    for op in () if graph is None else graph.get_operations():
        if not (op.op_def.is_stateful and "seed2" in op.node_def.attr):
            continue
        seeded = op.node_def.attr["seed"].i or op.node_def.attr["seed2"].i
        if not seeded or hasattr(part, "_num_parallel_calls"):
            raise UnsupportedError(
                f"map() with {op.type}, {'in parallel calls' if seeded else 'without a seed'}: a process that begins "
                "again draws other numbers",
                hint="tf.random.stateless_uniform or tf.image.stateless_random_crop, seeded from epoch and sample",
            )
