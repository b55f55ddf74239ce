"""The order of a map-style loader, which can start at any sample and be dealt again to another number of ranks.

Each index carries its epoch.

Theory. A sampler draws the order of an epoch, a list of sample indices (*entries*), from (seed, epoch). A
``DistributedSampler`` deals this order: entry i belongs to copy (of the model) i modulo the number of copies. When
every copy has drawn k batches of b samples, the job has drawn the first k * b * copies entries. That number is the
position of the job in the epoch, for any number of copies and any batch size. The later entries are dealt to the
present copies, as the sampler would deal a shorter epoch.

Invariants:
1. At a position that the present number of copies and batch size can reach, dealing again gives the same order as
   skipping batches.
2. A ``DistributedSampler`` (or a sampler whose order it deals) draws the same numbers from the default generators on
   all ranks. Otherwise the ranks would take their parts from different orders.
3. No entry after the position is left out or given twice, except by the sampler's own rule for the end of an epoch. To
   give all copies the same number, the sampler repeats the first entries, or leaves out the last ones (``drop_last``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping
from dataclasses import dataclass
from itertools import chain as joined
from itertools import cycle, islice
from typing import Any
from weakref import WeakKeyDictionary

import torch
import xxhash
from torch.utils.data import (
    BatchSampler,
    Dataset,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
)

from holdfast.frameworks.torch.state.rng import Draws, isolated, order_seed, sample_seed, seed_all, seed_each


def chain(sampler: Any) -> Iterator[Any]:
    """Yield a sampler or batch sampler, and the samplers from which it draws."""
    while sampler is not None:
        yield sampler
        sampler = (
            getattr(sampler, "batch_sampler", None) or getattr(sampler, "sampler", None) or _dealt_by(sampler)
        )


def _dealt_by(sampler: Any) -> Any:
    """Return the sampler whose order a ``DistributedSampler`` deals; None if ``sampler`` deals no sampler's order.

    Fabric and Lightning wrap a sampler as a dataset, and pass this dataset to the ``DistributedSampler``.
    """
    order = getattr(sampler, "dataset", None) if isinstance(sampler, DistributedSampler) else None
    found = (getattr(order, name, None) for name in ("_sampler", "sampler"))
    return next((each for each in found if isinstance(each, Sampler)), None)


@dataclass(frozen=True)
class OrderDeal:
    """The rule by which the order of an epoch is dealt to this rank, which is number ``copy`` of ``copies``.

    ``batch`` is the number of samples in one batch of a rank.
    """

    sampler: Any
    copies: int
    copy: int
    batch: int
    drop_last: bool

    @staticmethod
    def of(inner: Any, batched: bool) -> OrderDeal | None:
        """Return the rule of the sampler ``inner``, or of a batch sampler if ``batched``; None for other types."""
        batch, drop_last = 1, False
        if batched:
            if type(inner) is not BatchSampler:
                return None
            batch, drop_last, inner = inner.batch_size, inner.drop_last, inner.sampler
        if isinstance(inner, DistributedSampler):
            return OrderDeal(inner, inner.num_replicas, inner.rank, batch, drop_last)
        if type(inner) in (SequentialSampler, RandomSampler):
            return OrderDeal(inner, 1, 0, batch, drop_last)
        return None

    @property
    def share(self) -> int:
        """The number of samples that the job draws with one batch of each copy."""
        return self.copies * self.batch

    def left(self, seen: int) -> int:
        """Return this rank's number of remaining batches of an epoch after the job has drawn ``seen`` samples."""
        each = self._each(seen)
        return each // self.batch if self.drop_last else -(-each // self.batch)

    def rest(self, seen: int, seed: Callable[[], None]) -> list[Any]:
        """Return the entries (sample indices) of this rank for the rest of an epoch, after ``seen`` drawn samples.

        Args:
            seed: seeds the generators from which the sampler draws.
        """
        order = self._order(seed)[: self._length()]
        each = self._each(seen) * self.copies
        return list(islice(joined(order[seen:], cycle(order)), self.copy, each, self.copies))

    def _each(self, seen: int) -> int:
        """Return the number of entries that remain for each copy after the job has drawn ``seen`` samples."""
        left = max(0, self._length() - seen)
        return left // self.copies if getattr(self.sampler, "drop_last", False) else -(-left // self.copies)

    def _length(self) -> int:
        """Return the number of entries of an epoch, without those that the sampler repeats to fill up all copies."""
        if isinstance(self.sampler, DistributedSampler):
            return min(len(self.sampler.dataset), self.sampler.total_size)  # type: ignore[arg-type]
        return len(self.sampler)

    def _order(self, seed: Callable[[], None]) -> list[Any]:
        if self.copies == 1:
            seed()
            return list(self.sampler)
        hands: list[list[Any]] = []
        try:
            for copy in range(self.copies):
                self.sampler.rank = copy
                seed()
                hands.append(list(self.sampler))
        finally:
            self.sampler.rank = self.copy
        return [entry for dealt in zip(*hands, strict=True) for entry in dealt]


class Ref:
    """The index of one sample and its epoch, as sent to a loader worker."""

    __slots__ = ("epoch", "index")

    def __init__(self, epoch: int, index: Any) -> None:
        self.epoch = epoch
        self.index = index

    def __reduce__(self) -> tuple[type[Ref], tuple[int, Any]]:
        return Ref, (self.epoch, self.index)


class SeededDataset(Dataset[Any]):
    """The user's dataset, with the default generators seeded before each sample."""

    def __init__(self, inner: Any, seed: int) -> None:
        self.inner = inner
        self.seed = seed

    def __len__(self) -> int:
        return len(self.inner)

    def __getitem__(self, ref: Ref) -> Any:
        self.prepare(ref)
        return self.inner[ref.index]

    def __getattr__(self, name: str) -> Any:
        # Users' worker_init_fn and collate functions read attributes of get_worker_info().dataset.
        if name in ("inner", "seed") or name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.inner, name)

    def prepare(self, ref: Ref) -> None:
        """Seed the default generators for one sample."""
        index = (
            ref.index if isinstance(ref.index, int) else xxhash.xxh3_64_intdigest(repr(ref.index).encode())
        )
        seed_all(sample_seed(self.seed, ref.epoch, index))


class SeededBatches(SeededDataset):
    """A :class:`SeededDataset` that fetches a whole batch at once, seeded like the first sample of the batch."""

    def __getitems__(self, refs: list[Ref]) -> Any:
        if refs:
            self.prepare(refs[0])
        return self.inner.__getitems__([ref.index for ref in refs])


_SEEDED: MutableMapping[torch.Generator, tuple[int, int]] = (
    WeakKeyDictionary()
    if torch.Generator.__weakrefoffset__
    else {}  # torch 2.12: no weak references to generators
)
"""For each generator of a sampler: the seed that the user gave it, and the seed that Holdfast last gave it.

A second loop over the same loader must start from the user's seed, because a process that resumes in that loop does so.
"""


def _base_seed(generator: torch.Generator) -> int:
    base, ours = _SEEDED.get(generator, (0, None))
    return base if generator.initial_seed() == ours else generator.initial_seed()


class SamplerOrder:
    """A sampler or batch sampler that starts anywhere in an epoch and adds the epoch to each index."""

    def __init__(self, inner: Any, batched: bool, seed: int, draws: Draws) -> None:
        self._inner = inner
        self._batched = batched
        self._seed = seed
        self._draws = draws
        drawn = list(chain(inner))
        self._shared = any(isinstance(sampler, DistributedSampler) for sampler in drawn)
        found = (getattr(sampler, "generator", None) for sampler in drawn)
        self._own = {id(g): (g, _base_seed(g)) for g in found if isinstance(g, torch.Generator)}
        self.deal = OrderDeal.of(inner, batched)
        self.epoch = 0
        self.skip = 0
        self.seen: int | None = (
            None  # number of samples of the job after which the rest is dealt again; None: skip batches instead
        )

    def become(self, draws: Draws) -> None:
        """Draw from the streams ``draws`` from now on."""
        self._draws = draws
        self.deal = OrderDeal.of(self._inner, self._batched)

    def __len__(self) -> int:
        return len(self._inner)

    def __iter__(self) -> Iterator[Any]:
        return self._walk(self.epoch, self.skip) if self.seen is None else self._rest(self.epoch, self.seen)

    def _rest(self, epoch: int, seen: int) -> Iterator[Any]:
        assert self.deal is not None
        with isolated():
            entries = self.deal.rest(seen, lambda: self._seed_draws(epoch))
        batch = self.deal.batch
        for first in range(0, self.deal.left(seen) * batch, batch):
            yield self._stamp(epoch, entries[first : first + batch] if self._batched else entries[first])

    def _seed_draws(self, epoch: int) -> None:
        """Seed the samplers' generators, and the default generators, from which samplers without a generator draw."""
        for generator, base in self._own.values():
            generator.manual_seed(order_seed(base, epoch, 0))
            _SEEDED[generator] = (base, generator.initial_seed())
        draws = Draws.same(0) if self._shared else self._draws
        seed_each(draws, lambda stream: order_seed(self._seed, epoch, stream))

    def _walk(self, epoch: int, skip: int) -> Iterator[Any]:
        # Samplers draw most of their numbers at their first index.
        with isolated():
            self._seed_draws(epoch)
            inner = iter(self._inner)
            indices = list(_take(inner, skip + 1))[skip:]
        for index in indices:
            yield self._stamp(epoch, index)
        for index in inner:
            yield self._stamp(epoch, index)

    def _stamp(self, epoch: int, index: Any) -> Any:
        return [Ref(epoch, one) for one in index] if self._batched else Ref(epoch, index)


def _take(iterator: Iterator[Any], count: int) -> Iterator[Any]:
    for _, item in zip(range(count), iterator, strict=False):
        yield item
