"""The position of the job in a MindSpore pipeline, which survives a restart.

Theory. A pipeline draws its shuffles and augmentations from random generators. MindSpore seeds them when an iterator
is made, and they continue from epoch to epoch. The state of these generators cannot be saved. So each epoch gets a
new iterator, seeded from (the script's seed, the session's seed, the epoch). A position in the middle of an epoch is
reached by drawing from the epoch's start. The following batches then do not depend on earlier draws of this process.
The seed is the same on all ranks, because a shuffle deals its samples to all of them. Python functions that draw from
the global generators in a thread of this process race with the training. Such functions are detected when the first
batch of an epoch was drawn, and refused.

Sampler and batch deal sample i of an epoch to shard i modulo the number of shards. A position is therefore also a
number of samples of the job. A job with another number of ranks or another batch size can continue after that number of
samples. If a pipeline deals samples in another way, another number of ranks can continue only at the start of an epoch.

Invariants:
1. The batches after a position are a function of script, seed and position.
2. After a change of the number of ranks no sample of an epoch is left out or given twice. If that is impossible,
   :meth:`DataFeed.seek` raises.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import mindspore.dataset as ds
import numpy as np
import xxhash

from holdfast.errors import CheckpointMismatch, EmptyLoaderError, UnsupportedError, UsageError
from holdfast.frameworks.common.adapter import DataIdentity
from holdfast.frameworks.common.state_tree import Plain
from holdfast.text import plural

SEED_MAX = 1 << 31
PASSING = ("MapDataset", "ProjectDataset", "RenameDataset")
"""Types of pipeline stages that give as many samples as they take, in the same order."""
BLOCKS = ("MindDataset",)
"""Sources that deal blocks of samples instead of every n-th sample."""
AUGMENTS = ("Random", "AutoAugment", "RandAugment", "Uniform", "TrivialAugment", "MixUp", "CutMix", "CutOut")


class Counted(NamedTuple):
    """A dataset and the number of its batches (``steps``) that the job has already used.

    A feed starts after these batches if the checkpoint of the job holds no position in the data.
    """

    dataset: Any
    steps: int


class SampleDeal(NamedTuple):
    """The rule that deals an epoch's samples to this rank: every ``copies``-th sample, ``batch`` samples at a time.

    ``why_not``: the stage of the pipeline that deals by an unknown rule; empty if no stage does.
    """

    copies: int
    batch: int
    why_not: str

    @property
    def share(self) -> int:
        """The number of samples that all shards together draw in one batch each."""
        return self.copies * self.batch

    @staticmethod
    def of(dataset: Any) -> SampleDeal:
        """Return the rule by which a MindSpore pipeline deals its samples."""
        batch, why_not, node = 0, "", dataset
        while node.children:
            kind = type(node).__name__
            if kind == "BatchDataset" and not batch and isinstance(node.batch_size, int):
                batch = node.batch_size
            elif kind not in PASSING and not (kind == "RepeatDataset" and node.count == 1):
                why_not = why_not or kind
            node = node.children[0]
        sampler = getattr(node, "sampler", None)
        kind = type(node).__name__
        known = isinstance(node, ds.engine.datasets.MappableDataset) and kind not in BLOCKS
        copies = int(getattr(node, "num_shards", None) or 1)
        if isinstance(sampler, ds.DistributedSampler):
            copies = sampler.num_shards
        elif sampler is not None and not isinstance(sampler, ds.SequentialSampler | ds.RandomSampler):
            why_not = why_not or type(sampler).__name__
        if getattr(sampler, "child_sampler", None) is not None:
            why_not = why_not or "a sampler of a sampler"
        return SampleDeal(copies, batch or 1, why_not or ("" if known else kind))


class DataFeed:
    """The batches of a MindSpore pipeline; see :class:`holdfast.frameworks.common.adapter.Feed`.

    Args:
        loader: a ``mindspore.dataset.Dataset``, or a :class:`Counted` dataset.
        seed: seed of the session.
        world_size: number of ranks of the job.
        busy: called with True while an epoch is drawn again up to the position, and with False afterwards.

    Raises:
        UsageError: the loader is not a dataset of MindSpore.
        UnsupportedError: the random numbers of its augmentations depend on time.
        EmptyLoaderError: the dataset yields no batch.
    """

    repeatable = False
    rewinds = False

    def __init__(self, loader: Any, seed: int, world_size: int, busy: Callable[[bool], None]) -> None:
        dataset, done = loader if isinstance(loader, Counted) else (loader, 0)
        if not isinstance(dataset, ds.Dataset):
            raise UsageError(
                f"the loader is a {type(dataset).__name__}, not a mindspore.dataset.Dataset",
                hint="for step in s.steps(dataset): with step as batch: cell(*batch)",
            )
        _refuse_autotune(dataset)
        self._dataset = dataset
        self._size = int(dataset.get_dataset_size())
        if self._size < 1:
            raise EmptyLoaderError(
                "the dataset yields no batch",
                hint="is it empty, or smaller than one batch with drop_remainder=True?",
            )
        self._deal = SampleDeal.of(dataset)
        self._world_size = world_size
        self._seeds = (int(ds.config.get_seed()), seed)
        self._busy = busy
        self._iterator: Iterator[Any] | None = None
        self.epoch, self.batch = divmod(done, self._size)
        self.last_in_epoch = False

    def place(self) -> Mapping[str, int]:
        """Return the position: the epoch and the number of batches drawn in it.

        The entry ``seen`` is the number of samples that the job has drawn in the epoch.
        """
        ended = self.batch >= self._size
        epoch, batch = (self.epoch + 1, 0) if ended else (self.epoch, self.batch)
        at = {"epoch": epoch, "batch": batch, "ranks": self._world_size}
        if not self._deal.why_not:
            at.update(seen=batch * self._deal.share, share=self._deal.share)
        return at

    def seek(self, place: Mapping[str, int], local: Plain = None) -> None:
        """Move to the position ``place``. Raises: CheckpointMismatch: no batch of this pipeline begins there."""
        self._iterator = None
        self.epoch, self.batch = place["epoch"], place["batch"]
        if self.batch == 0 or self._like(place):
            return
        share = self._deal.share
        if self._deal.why_not or "seen" not in place:
            raise CheckpointMismatch(
                f"the checkpoint is in the middle of an epoch of {plural(place.get('ranks', 0), 'rank')}, this job "
                f"has {self._world_size}: the samples that are left are not known for a pipeline with "
                f"{self._deal.why_not or 'another deal'}",
                hint=f"continue with {plural(place.get('ranks', 0), 'rank')} to the end of the epoch; or shard at the "
                "source (num_shards=, shard_id=) and shuffle there (shuffle=True)",
            )
        self.batch, beyond = divmod(place["seen"], share)
        if beyond:
            raise CheckpointMismatch(
                f"the job has trained on {place['seen']} samples of the epoch, and a step has {share} now: "
                "no step begins there",
                hint=f"a batch size with which a step has a number of samples that divides {place['seen']}",
            )

    def _like(self, place: Mapping[str, int]) -> bool:
        """Return True if the job that saved ``place`` dealt its samples as this job does."""
        now = self.place()
        same = place.get("share") == now.get("share")
        return place.get("ranks", self._world_size) == self._world_size and same

    def identity(self) -> DataIdentity | None:
        """Return None: the content of a pipeline is not known."""
        return None

    def local_state(self) -> Plain:
        """Return None: the position is the same on all ranks."""
        return None

    def draw(self, epochs: int | None = None) -> Any:
        """Return the next batch. Raises: StopIteration, UnsupportedError."""
        while True:
            if self.batch >= self._size:
                self.epoch, self.batch, self._iterator = self.epoch + 1, 0, None
            if epochs is not None and self.epoch >= epochs:
                raise StopIteration
            try:
                item = self._begin() if self._iterator is None else next(self._iterator)
            except StopIteration:  # a filter gave fewer batches than the dataset's size
                self.batch = self._size
                continue
            self.batch += 1
            self.last_in_epoch = self.batch >= self._size
            return item

    def close(self) -> None:
        """Discard the iterator."""
        self._iterator = None

    def _begin(self) -> Any:
        """Return the next batch at the position, from a new iterator. Raises: StopIteration, UnsupportedError."""
        base, seed = self._seeds
        mixed = xxhash.xxh3_64_intdigest(f"{base} {seed} {self.epoch}".encode()) % SEED_MAX
        states = random.getstate(), np.random.get_state()
        ds.config.set_seed(mixed)
        for sampler in _samplers(self._dataset):
            sampler.seed = mixed
        before = _drawn()
        self._busy(True)
        try:
            # MindSpore's training code may have replaced the method of the object; the class has the original.
            copies = ds.config.get_iterator_mode()["do_copy"]
            made = type(self._dataset).create_tuple_iterator(self._dataset, num_epochs=1, do_copy=copies)
            item = next(made)
            if _drawn() != before:
                raise UnsupportedError(
                    "a Python function of the pipeline draws from the generators of `random` or `numpy.random` in a "
                    f"thread beside the training, so no run draws the same twice: {_functions(self._dataset)}",
                    hint="map(..., python_multiprocessing=True), an operation of MindSpore's own, or a generator that "
                    "the function seeds from its sample",
                )
            for _ in range(self.batch):
                item = next(made)
        finally:
            self._busy(False)
            ds.config.set_seed(base)
            random.setstate(states[0])
            np.random.set_state(states[1])
        self._iterator = made
        return item


def _drawn() -> tuple[object, ...]:
    """Return a value that changes when a global generator of Python or NumPy is drawn from."""
    state: Any = np.random.get_state()
    return random.getstate(), bytes(state[1]), state[2]


def _nodes(dataset: Any) -> Iterator[Any]:
    """Yield all stages of a pipeline."""
    yield dataset
    for child in dataset.children:
        yield from _nodes(child)


def _samplers(dataset: Any) -> Iterator[Any]:
    """Yield the samplers of a pipeline that keep a seed."""
    for node in _nodes(dataset):
        sampler = getattr(node, "sampler", None)
        while sampler is not None:
            if hasattr(sampler, "seed"):
                yield sampler
            sampler = getattr(sampler, "child_sampler", None)


def _operations(dataset: Any) -> Iterator[Any]:
    for node in _nodes(dataset):
        found = getattr(node, "operations", None) or ()
        yield from found if isinstance(found, list | tuple) else (found,)


def _functions(dataset: Any) -> str:
    """Return the names of a pipeline's operations, as text."""
    names = [getattr(each, "__name__", type(each).__name__) for each in _operations(dataset)]
    return ", ".join(names) or "its source"


def _refuse_autotune(dataset: Any) -> None:
    """Refuse a pipeline with a random augmentation while MindSpore's autotune is on.

    Raises:
        UnsupportedError: autotune changes the number of threads that run an augmentation. The random numbers depend
            on this number.
    """
    names = [type(each).__name__ for each in _operations(dataset)]
    drawn = next((name for name in names if name.startswith(AUGMENTS)), None)
    if drawn is not None and ds.config.get_enable_autotune():
        raise UnsupportedError(
            f"autotune changes how many workers {drawn} has, and with them what it draws",
            hint="mindspore.dataset.config.set_enable_autotune(False)",
        )
