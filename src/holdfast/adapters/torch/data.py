"""Where the job is in its data, and how to get there again without reading what was already used.

Theory. A position is (epoch, batches drawn in that epoch). What a sampler draws in an epoch is made a function of
(seed, epoch): a ``DistributedSampler`` is so by ``set_epoch``, any other is seeded before it draws. To go to a
position, index lists are skipped; no skipped sample is loaded. Each sample is seeded from (seed, epoch, index) in
whichever process loads it, so random augmentation does not depend on the number of loader workers or on a restart.

Sources, by what the user gives:

- a ``DataLoader`` over a map-style dataset is rebuilt around the same dataset, sampler and settings (``MapSource``);
- a loader with ``state_dict`` (torchdata's ``StatefulDataLoader``) is positioned by it (``StatefulSource``); its state
  belongs to one rank and travels in the status page;
- any other iterable is read again from the start of the epoch up to the position, with a warning (``ReplaySource``).
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch
import xxhash
from torch.utils._pytree import tree_map_only
from torch.utils.data import DataLoader, Dataset, IterableDataset

from holdfast.adapters.torch.rng import fetch_seed, isolated, order_seed, sample_seed, seed_all
from holdfast.adapters.values import Plain, join, split
from holdfast.errors import EmptyLoaderError, UsageError

log = logging.getLogger("holdfast")


@dataclass(frozen=True)
class Position:
    """``batch`` batches of epoch ``epoch`` were drawn."""

    epoch: int = 0
    batch: int = 0


class Source(Protocol):
    """Batches of one epoch, from any position."""

    length: int | None  # batches per epoch of this rank, when it can be known

    def open(self, epoch: int, skip: int) -> Iterator[Any]:
        """Iterate over ``epoch`` without its first ``skip`` batches."""

    def local_state(self) -> Plain:
        """What only this rank knows of its position, or None."""

    def restore_local(self, state: Plain) -> None:
        """The next :meth:`open` goes on from this state."""

    def close(self) -> None:
        """Stop loader workers."""


class Feed:
    """Draws batches, epoch after epoch.

    Args:
        source: where batches come from.
    """

    def __init__(self, source: Source) -> None:
        self._source = source
        self._iterator: Iterator[Any] | None = None
        self.position = Position()
        self.epoch = 0
        self.last_in_epoch = False

    def place(self) -> dict[str, int]:
        """The position after the last batch drawn, as plain values."""
        return {"epoch": self.position.epoch, "batch": self.position.batch}

    def seek(self, place: Mapping[str, int], local: Plain = None) -> None:
        """Go to a place; ``local`` is what :meth:`local_state` returned there, if anything."""
        self._iterator = None
        self.position = Position(place["epoch"], place["batch"])
        if local is not None:
            self._source.restore_local(local)

    def local_state(self) -> Plain:
        """Rank-local part of the position (see :class:`StatefulSource`), or None."""
        return self._source.local_state()

    def draw(self, epochs: int | None = None) -> Any:
        """The next batch; moves to the next epoch at the end of one.

        Raises:
            StopIteration: ``epochs`` epochs are over.
            EmptyLoaderError: an epoch yields nothing.
        """
        while epochs is None or self.position.epoch < epochs:
            position = self.position
            if self._iterator is None:
                self._iterator = self._source.open(position.epoch, position.batch)
            try:
                batch = next(self._iterator)
            except StopIteration:
                self._iterator = None
                if position.batch == 0:
                    raise EmptyLoaderError(
                        f"the loader yields no batch in epoch {position.epoch}",
                        hint="is the dataset empty, or smaller than one batch with drop_last=True?",
                    ) from None
                self.position = Position(position.epoch + 1, 0)
                continue
            self.epoch = position.epoch
            self.position = Position(position.epoch, position.batch + 1)
            self.last_in_epoch = self.position.batch == self._source.length
            return batch
        raise StopIteration

    def close(self) -> None:
        """Stop loader workers."""
        self._iterator = None
        self._source.close()


def make_source(loader: Any, seed: int, rank: int) -> Source:
    """The source that fits what the user gave to ``steps``.

    Raises:
        UsageError: not iterable.
    """
    if type(loader).__module__ == "accelerate.data_loader":
        return _prepared_source(loader, seed)
    if hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict"):
        return StatefulSource(loader, seed, rank)
    if (
        isinstance(loader, DataLoader)
        and type(loader).__iter__ is DataLoader.__iter__
        and not isinstance(loader.dataset, IterableDataset)
    ):
        return MapSource(loader, seed, rank)
    if not hasattr(loader, "__iter__"):
        raise UsageError(
            f"steps() got a {type(loader).__name__} as loader, which cannot be iterated",
            hint="give a DataLoader or any iterable of batches, or none",
        )
    if hasattr(loader, "__next__"):
        raise UsageError(
            "steps() got an iterator: it has no start to go back to",
            hint="give the iterable that makes it (a DataLoader, a list, an object with __iter__)",
        )
    return ReplaySource(loader, seed, rank)


def _prepared_source(loader: Any, seed: int) -> Source:
    """What ``accelerator.prepare`` made of a DataLoader: the sampler draws for the whole job, as on rank 0."""
    if isinstance(loader.dataset, IterableDataset) or not isinstance(loader, DataLoader):
        raise UsageError(
            f"steps() got a {type(loader).__name__} of accelerate over an iterable dataset: it has no position",
            hint="give steps() the loader as it was before accelerator.prepare(...)",
        )
    return _PlacedSource(loader, seed, 0)


def _set_epoch(epoch: int, *owners: Any) -> None:
    seen: set[int] = set()
    for owner in owners:
        if id(owner) not in seen and callable(getattr(owner, "set_epoch", None)):
            owner.set_epoch(epoch)
        seen.add(id(owner))


def _chain(sampler: Any) -> Iterator[Any]:
    """A (batch) sampler and those that it draws from."""
    while sampler is not None:
        yield sampler
        sampler = getattr(sampler, "batch_sampler", None) or getattr(sampler, "sampler", None)


def _length(loader: Any) -> int | None:
    try:
        return len(loader)
    except TypeError:
        return None


def _shut(iterator: Any) -> None:
    """Stop the worker processes of a DataLoader's iterator now, not when it is collected."""
    stop = getattr(iterator, "_shutdown_workers", None)
    if stop is not None:
        stop()


class _Ref:
    """Index of one sample in one epoch, as it travels to a loader worker."""

    __slots__ = ("epoch", "index")

    def __init__(self, epoch: int, index: Any) -> None:
        self.epoch = epoch
        self.index = index

    def __reduce__(self) -> tuple[type[_Ref], tuple[int, Any]]:
        return _Ref, (self.epoch, self.index)


class _Seeded(Dataset[Any]):
    """The user's dataset, with the default generators seeded before each sample."""

    def __init__(self, inner: Any, seed: int) -> None:
        self.inner = inner
        self.seed = seed

    def __len__(self) -> int:
        return len(self.inner)

    def __getitem__(self, ref: _Ref) -> Any:
        self.prepare(ref)
        return self.inner[ref.index]

    def __getattr__(self, name: str) -> Any:
        # worker_init_fn and collate functions of users look at get_worker_info().dataset.
        if name in ("inner", "seed") or name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.inner, name)

    def prepare(self, ref: _Ref) -> None:
        """Seed the default generators for one sample."""
        index = (
            ref.index if isinstance(ref.index, int) else xxhash.xxh3_64_intdigest(repr(ref.index).encode())
        )
        seed_all(sample_seed(self.seed, ref.epoch, index))


class _SeededBatches(_Seeded):
    """The same for datasets that fetch a batch at once: one seed per batch, from its first sample."""

    def __getitems__(self, refs: list[_Ref]) -> Any:
        if refs:
            self.prepare(refs[0])
        return self.inner.__getitems__([ref.index for ref in refs])


_SEEDED: WeakKeyDictionary[torch.Generator, tuple[int, int]] = WeakKeyDictionary()
"""The user's seed of each generator, and what we last seeded it with: a second loop over the same loader must find the
first, as a process that is resumed in that loop does."""


def _base_seed(generator: torch.Generator) -> int:
    base, ours = _SEEDED.get(generator, (0, None))
    return base if generator.initial_seed() == ours else generator.initial_seed()


class _Order:
    """A (batch) sampler that starts anywhere in an epoch and stamps each index with the epoch."""

    def __init__(self, inner: Any, batched: bool, seed: int, rank: int) -> None:
        self._inner = inner
        self._batched = batched
        self._seed = seed
        self._rank = rank
        found = (getattr(sampler, "generator", None) for sampler in _chain(inner))
        self._own = {id(g): (g, _base_seed(g)) for g in found if isinstance(g, torch.Generator)}
        self.epoch = 0
        self.skip = 0

    def __len__(self) -> int:
        return len(self._inner)

    def __iter__(self) -> Iterator[Any]:
        return self._walk(self.epoch, self.skip)

    def _walk(self, epoch: int, skip: int) -> Iterator[Any]:
        for generator, base in self._own.values():
            generator.manual_seed(order_seed(base, epoch, 0))
            _SEEDED[generator] = (base, generator.initial_seed())
        # Samplers without a generator draw from the default ones, most of them at their first index.
        with isolated():
            seed_all(order_seed(self._seed, epoch, self._rank))
            inner = iter(self._inner)
            indices = list(_take(inner, skip + 1))[skip:]
        for index in indices:
            yield self._stamp(epoch, index)
        for index in inner:
            yield self._stamp(epoch, index)

    def _stamp(self, epoch: int, index: Any) -> Any:
        return [_Ref(epoch, one) for one in index] if self._batched else _Ref(epoch, index)


def _take(iterator: Iterator[Any], count: int) -> Iterator[Any]:
    for _, item in zip(range(count), iterator, strict=False):
        yield item


class MapSource:
    """A ``DataLoader`` over a map-style dataset, rebuilt so that it can start anywhere.

    Every setting of the user's loader is kept; its ``generator`` only names the order (it is seeded anew per epoch).
    """

    def __init__(self, loader: DataLoader[Any], seed: int, rank: int) -> None:
        self.length: int | None = _length(loader)
        self._user = loader
        self._seed = seed
        self._rank = rank
        batched = loader.batch_sampler is not None
        inner = loader.batch_sampler if batched else loader.sampler
        self._order = _Order(inner, batched, seed, rank)
        self._generator = torch.Generator()
        self._loader = self._rebuild(loader, batched)
        self._iterator: Any = None

    def _rebuild(self, loader: DataLoader[Any], batched: bool) -> DataLoader[Any]:
        dataset: Any = loader.dataset
        wrapper = _SeededBatches if hasattr(dataset, "__getitems__") else _Seeded
        order: dict[str, Any] = (
            {"batch_sampler": self._order} if batched else {"sampler": self._order, "batch_size": None}
        )
        return DataLoader(
            wrapper(dataset, self._seed),
            num_workers=loader.num_workers,
            collate_fn=loader.collate_fn,
            pin_memory=loader.pin_memory,
            timeout=loader.timeout,
            worker_init_fn=loader.worker_init_fn,
            multiprocessing_context=loader.multiprocessing_context,
            generator=self._generator,
            prefetch_factor=loader.prefetch_factor,
            persistent_workers=loader.persistent_workers,
            pin_memory_device=loader.pin_memory_device,
            in_order=getattr(loader, "in_order", True),
            **order,
        )

    def open(self, epoch: int, skip: int) -> Iterator[Any]:
        """Iterate over ``epoch`` without loading its first ``skip`` batches."""
        user = self._user
        _set_epoch(
            epoch, user, user.sampler, user.batch_sampler, getattr(user.batch_sampler, "sampler", None)
        )
        self._order.epoch, self._order.skip = epoch, skip
        self._generator.manual_seed(order_seed(self._seed, epoch, self._rank))
        if not self._loader.persistent_workers:
            _shut(self._iterator)
        self._iterator = iter(self._loader)
        made: Iterator[Any] = self._iterator
        return made

    def local_state(self) -> Plain:
        """Nothing: the position says it all."""
        return None

    def restore_local(self, state: Plain) -> None:
        """Saved by another kind of loader: the position is enough."""

    def close(self) -> None:
        """Stop loader workers."""
        _shut(self._iterator)
        self._iterator = None


class _PlacedSource(MapSource):
    """The same for accelerate's loaders, which put batches on the device."""

    def open(self, epoch: int, skip: int) -> Iterator[Any]:
        """As :meth:`MapSource.open`."""
        device = getattr(self._user, "device", None)
        for batch in super().open(epoch, skip):
            yield batch if device is None else tree_map_only(torch.Tensor, lambda t: t.to(device), batch)


class StatefulSource:
    """A loader that knows its own position (``state_dict``), per rank."""

    def __init__(self, loader: Any, seed: int, rank: int) -> None:
        self.length: int | None = _length(loader)
        self._loader = loader
        self._seed = seed
        self._rank = rank
        self._restored = False
        self._iterator: Any = None

    def open(self, epoch: int, skip: int) -> Iterator[Any]:
        """Iterate over ``epoch``: from the restored state, else from its start (``skip`` batches are read again)."""
        _set_epoch(epoch, self._loader, getattr(self._loader, "sampler", None))
        _shut(self._iterator)
        first = skip if self._restored else 0
        self._restored = False
        if skip > first:
            log.warning(
                "holdfast: no saved state of the data loader on this rank: reading %d batches again", skip
            )
        return self._walk(epoch, first, skip)

    def _walk(self, epoch: int, first: int, skip: int) -> Iterator[Any]:
        seed_all(order_seed(self._seed, epoch, self._rank))
        self._iterator = iter(self._loader)
        yield from _seeded_walk(self._iterator, self._seed, epoch, first, skip, self._rank)

    def local_state(self) -> Plain:
        """The loader's ``state_dict`` as plain values."""
        return split(self._loader.state_dict(), "loader", _inline)

    def restore_local(self, state: Plain) -> None:
        """Load the loader's ``state_dict``."""
        self._loader.load_state_dict(join(state, _from_inline))
        self._restored = True

    def close(self) -> None:
        """Stop loader workers."""
        _shut(self._iterator)
        self._iterator = None


class ReplaySource:
    """Any iterable: the position is reached by reading."""

    def __init__(self, loader: Any, seed: int, rank: int) -> None:
        self.length: int | None = _length(loader)
        self._loader = loader
        self._seed = seed
        self._rank = rank
        self._iterator: Any = None
        if isinstance(loader, DataLoader) and loader.generator is None:
            loader.generator = torch.Generator()

    def open(self, epoch: int, skip: int) -> Iterator[Any]:
        """Iterate over ``epoch``; the first ``skip`` batches are read and dropped."""
        loader = self._loader
        _set_epoch(epoch, loader, getattr(loader, "dataset", None))
        if isinstance(loader, DataLoader) and isinstance(loader.generator, torch.Generator):
            loader.generator.manual_seed(order_seed(self._seed, epoch, self._rank))
        if skip:
            log.warning(
                "holdfast: %s has no position to go to: reading %d batches again", type(loader).__name__, skip
            )
        _shut(self._iterator)
        return self._walk(epoch, skip)

    def _walk(self, epoch: int, skip: int) -> Iterator[Any]:
        seed_all(order_seed(self._seed, epoch, self._rank))
        self._iterator = iter(self._loader)
        yield from _seeded_walk(self._iterator, self._seed, epoch, 0, skip, self._rank)

    def local_state(self) -> Plain:
        """Nothing."""
        return None

    def restore_local(self, state: Plain) -> None:
        """Saved by another kind of loader: the position is enough."""

    def close(self) -> None:
        """Stop loader workers."""
        _shut(self._iterator)
        self._iterator = None


def _seeded_walk(
    iterator: Iterator[Any], seed: int, epoch: int, batch: int, skip: int, rank: int
) -> Iterator[Any]:
    """Items from number ``batch`` on, those below ``skip`` dropped.

    What an iterable draws in this process must not depend on what the steps between drew; samplers draw their order
    with the first item.
    """
    while True:
        seed_all(fetch_seed(seed, epoch, batch, rank) if batch else order_seed(seed, epoch, rank))
        try:
            item = next(iterator)
        except StopIteration:
            return
        if batch >= skip:
            yield item
        batch += 1


def _inline(value: Any, path: str) -> Plain:
    """A small tensor inside a loader's state, as plain values."""
    if not isinstance(value, torch.Tensor):
        return None
    flat = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    dtype = str(value.dtype).removeprefix("torch.")
    return {"dtype": dtype, "shape": list(value.shape), "data": flat}


def _from_inline(value: Plain) -> torch.Tensor:
    flat = torch.frombuffer(bytearray(value["data"]), dtype=torch.uint8)
    return flat.view(getattr(torch, value["dtype"])).reshape(value["shape"])
