"""The position of the job in its data, and the return to a position without reading samples that were already used.

Theory. A position is (epoch, batches drawn in that epoch). The draws of a sampler in an epoch are made a function of
(seed, epoch): for a ``DistributedSampler`` by ``set_epoch``, for any other sampler by seeding the generators before it
draws. To go to a position, index lists are skipped; no skipped sample is loaded. If the rule that deals samples to
ranks is known (``sampler_order.py``), the position also holds the number of samples of the epoch that the whole job has
drawn. A job with another number of ranks or another batch size can then continue there. Each sample is seeded from
(seed, epoch, index) in the process that loads it. Random augmentation therefore depends neither on the number of loader
workers nor on a restart.

Sources, by the type of the user's loader:
- a ``DataLoader`` over a map-style dataset is rebuilt around the same dataset, sampler and settings (``MapSource``),
  also one of YOLO or timm whose sampler repeats without an end;
- a loader with ``state_dict`` (torchdata's ``StatefulDataLoader``) goes to a position by ``load_state_dict``
  (``StatefulSource``); its state belongs to one rank, whose status page carries it;
- any other iterable is read again from the start of the epoch up to the position, with a warning (``ReplaySource``).
"""

from __future__ import annotations

import copy
import logging
import multiprocessing
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import count, cycle
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from holdfast.errors import EmptyLoaderError, UsageError
from holdfast.frameworks.common.adapter import DataIdentity, length_of
from holdfast.frameworks.common.state_tree import Plain, join, split
from holdfast.frameworks.torch import private_api
from holdfast.frameworks.torch.data.dataset_identity import identity
from holdfast.frameworks.torch.data.inner_loaders import begin_epoch, samplers_in, set_epoch
from holdfast.frameworks.torch.data.sampler_order import OrderDeal, SamplerOrder, SeededBatches, SeededDataset
from holdfast.frameworks.torch.state.boxes import byte_view
from holdfast.frameworks.torch.state.rng import Draws, fetch_seed, order_seed, seed_each
from holdfast.text import plural

log = logging.getLogger("holdfast")


@dataclass(frozen=True)
class Position:
    """A position in the data of one rank: ``batch`` batches of epoch ``epoch`` were drawn."""

    epoch: int = 0
    batch: int = 0


class Source(ABC):
    """The base class of the sources of batches, which yield one epoch from any position.

    Args:
        user: the user's loader.
        seed: seed of the session.
        draws: the streams of random numbers of the copy of the model that the batches are for.

    Attributes:
        length: batches per epoch of this rank; None if not known.
        device: device to which the user's loader moves batches; None if it does not move them.
    """

    def __init__(self, user: Any, seed: int, draws: Draws) -> None:
        self.length: int | None = length_of(user)
        self.device: torch.device | None = None
        self._user = user
        self._seed = seed
        self._draws = draws
        self._iterator: Any = None

    @abstractmethod
    def open(self, epoch: int, skip: int) -> Iterator[Any]:
        """Return an iterator over the batches of ``epoch`` without the first ``skip`` batches."""

    def become(self, draws: Draws) -> None:
        """Draw from the streams ``draws`` from now on."""
        self._draws = draws

    def placed(self, batch: Any) -> Any:
        """Return ``batch`` moved to the device of the user's loader."""
        if self.device is None:
            return batch
        return private_api.tree_map_only(torch.Tensor, lambda t: t.to(self.device), batch)

    def identity(self) -> DataIdentity | None:
        """Return the identity of the dataset; None if it is not known."""
        return None

    def words(self, position: Position) -> dict[str, int]:
        """Return the values besides epoch and batch by which a job with another number of ranks finds the position."""
        return {}

    def find(self, place: Mapping[str, int]) -> int:
        """Return the index, within its epoch, of the first batch after the saved position ``place``."""
        return place["batch"]

    def local_state(self) -> Plain:
        """Return the part of the position that only this rank knows, or None."""
        return None

    def restore_local(self, state: Plain) -> None:  # noqa: B027  # most have none
        """Make the next :meth:`open` continue from ``state``. Do nothing if the position alone is enough."""

    def close(self) -> None:
        """Stop the worker processes of the loader."""
        private_api.stop_workers(self._iterator)
        self._iterator = None

    def _begin(self, epoch: int, seed: int | None = None) -> None:
        """Prepare the user's loader for ``epoch``; ``seed`` is for its generators."""
        private_api.stop_workers(self._iterator)
        begin_epoch(self._user, epoch, seed)

    def _read(self, epoch: int, first: int, skip: int) -> Iterator[Any]:
        """Read the user's loader and yield its batches from index ``skip`` on.

        ``first`` is the index, in the epoch, of the first batch that the loader returns. The generators are seeded
        before each batch. So the random draws of an iterable in this process do not depend on random draws of the steps
        in between. A sampler draws its order at the first batch.
        """
        seed_each(self._draws, partial(order_seed, self._seed, epoch))
        self._iterator = iter(self._user)
        for batch in count(first):
            if batch:
                seed_each(self._draws, partial(fetch_seed, self._seed, epoch, batch))
            else:
                seed_each(self._draws, partial(order_seed, self._seed, epoch))
            try:
                item = next(self._iterator)
            except StopIteration:
                return
            if batch >= skip:
                yield item


class TorchFeed:
    """The batches of the user's loader, epoch after epoch.

    Args:
        source: the reader of the loader, made by :func:`make_source`.
    """

    def __init__(self, source: Source) -> None:
        self._source = source
        self._iterator: Iterator[Any] | None = None
        self.position = Position()
        self.epoch = 0
        self.last_in_epoch = False
        self.repeatable = isinstance(source, MapSource)
        self.rewinds = True

    def become(self, draws: Draws) -> None:
        """Start again at the first batch with the streams ``draws``, because this process is not a spare any longer.

        The batches drawn before this call were for no rank. Loader workers that are running continue to work for the
        new rank.
        """
        self._iterator = None
        self.position = Position()
        self._source.become(draws)

    def place(self) -> dict[str, int]:
        """Return the position after the last batch drawn, as plain values."""
        at = self.position
        return {"epoch": at.epoch, "batch": at.batch, **self._source.words(at)}

    def seek(self, place: Mapping[str, int], local: Plain = None) -> None:
        """Go to the position ``place``, a result of :meth:`place`.

        ``local`` is the result of :meth:`local_state` at the same position, or None. Data that can only be read again,
        and that are at this position, are not read again.
        """
        if self._iterator is not None and not self.repeatable and place == self.place():
            return
        self._iterator = None
        self.position = Position(place["epoch"], self._source.find(place))
        if local is not None:
            self._source.restore_local(local)

    def identity(self) -> DataIdentity | None:
        """Return the identity of the dataset; None if it is not known."""
        return self._source.identity()

    def local_state(self) -> Plain:
        """Return the rank-local part of the position (see :class:`StatefulSource`), or None."""
        return self._source.local_state()

    def draw(self, epochs: int | None = None) -> Any:
        """Return the next batch; after the last batch of an epoch, the first of the next epoch.

        Args:
            epochs: number of epochs to draw; None means no limit.

        Raises:
            StopIteration: ``epochs`` epochs are over.
            EmptyLoaderError: an epoch yields no batch.
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
            except BaseException:
                self._iterator = None  # an iterator that has raised would seem to be at its end
                raise
            self.epoch = position.epoch
            self.position = Position(position.epoch, position.batch + 1)
            self.last_in_epoch = self.position.batch == self._source.length
            return self._source.placed(batch)
        raise StopIteration

    def close(self) -> None:
        """Stop the worker processes of the loader."""
        self._iterator = None
        self._source.close()


def make_source(loader: Any, seed: int, draws: Draws, *, spare: bool = False) -> Source:
    """Return the object that reads batches from the loader that the user gave to ``steps``.

    Args:
        seed: seed of the session.
        draws: the streams of random numbers of the copy of the model that the batches are for.
        spare: True if this process has no rank yet; see :meth:`TorchFeed.become`.

    Raises:
        UsageError: ``loader`` is not iterable, or is an iterator.
    """
    if type(loader).__module__ == "accelerate.data_loader":
        return _prepared_source(loader, seed)
    if type(loader).__name__ == "_FabricDataLoader":  # see `unwrapped`
        source = make_source(loader._dataloader, seed, draws, spare=spare)
        source.device = loader.device
        return source
    if hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict"):
        return StatefulSource(loader, seed, draws)
    if (
        isinstance(loader, DataLoader)
        and (type(loader).__iter__ is DataLoader.__iter__ or _repeats(loader))
        and not isinstance(loader.dataset, IterableDataset)
    ):
        return MapSource(loader, seed, draws, spare)
    held = loader.values() if isinstance(loader, Mapping) else loader
    if isinstance(loader, Mapping | list | tuple) and any(isinstance(each, DataLoader) for each in held):
        raise UsageError(
            f"steps() got a {type(loader).__name__} of loaders, and would take each loader as a batch",
            hint="give the loaders themselves: s.steps(labeled, unlabeled); the block gets one batch of each",
        )
    if not hasattr(loader, "__iter__"):
        hint = "give a DataLoader or any iterable of batches, or none"
        if isinstance(loader, int):
            hint = f"for {loader} steps: s.steps(until={loader})"
        elif hasattr(loader, "__next__"):
            hint = "give the loader from which it takes its batches; several loaders: s.steps(loader, second)"
        raise UsageError(
            f"steps() got a loader of type {type(loader).__name__}, which cannot be iterated", hint=hint
        )
    if hasattr(loader, "__next__"):
        if isinstance(loader, DataLoader):
            raise UsageError(
                f"steps() got a {type(loader).__name__}, a DataLoader that is its own iterator: it has no start to go "
                "back to",
                hint="give a plain one over the same data: DataLoader(loader.dataset, batch_size=loader.batch_size, "
                "sampler=loader.sampler, drop_last=loader.drop_last, collate_fn=loader.collate_fn)",
            )
        raise UsageError(
            "steps() got an iterator: it has no start to go back to",
            hint="give the iterable that makes it (a DataLoader, a list, an object with __iter__)"
            + ("; several loaders: s.steps(loader, second)" if isinstance(loader, zip | cycle) else ""),
        )
    return ReplaySource(loader, seed, draws)


def unwrapped(loader: Any) -> tuple[Any, torch.device | None]:
    """Return the loader inside Fabric's wrapper, and the wrapper's device; for any other loader, itself and None.

    Fabric's wrapper sets its sampler's epoch from a counter that starts at 0 in each process. In a replacement this
    epoch would be wrong.
    """
    if type(loader).__name__ != "_FabricDataLoader":
        return loader, None
    return loader._dataloader, loader.device


def _prepared_source(loader: Any, seed: int) -> Source:
    """Return the object that reads batches from a DataLoader of ``accelerator.prepare``.

    The sampler of such a loader draws the order of the whole job on every rank. So all ranks seed the sampler equally.
    """
    if isinstance(loader.dataset, IterableDataset) or not isinstance(loader, DataLoader):
        raise UsageError(
            f"steps() got a {type(loader).__name__} of accelerate over an iterable dataset: it has no position",
            hint="give steps() the loader as it was before accelerator.prepare(...)",
        )
    source = _PreparedSource(loader, seed, Draws.same(0))
    source.device = getattr(loader, "device", None)
    return source


class MapSource(Source):
    """A ``DataLoader`` over a map-style dataset, rebuilt so that it can start at any batch.

    Every setting of the user's loader is kept. The seed of its ``generator`` only selects the order, because the
    generator is seeded again in each epoch.
    """

    def __init__(self, loader: DataLoader[Any], seed: int, draws: Draws, spare: bool = False) -> None:
        super().__init__(loader, seed, draws)
        batched = loader.batch_sampler is not None
        inner: Any = loader.batch_sampler if batched else loader.sampler
        self._repeats = _repeats(loader)
        if self._repeats:
            inner = inner.sampler
        self._inner = inner
        self._order = SamplerOrder(inner, batched, seed, draws)
        self._generator = torch.Generator()
        self._batched = batched
        self._changes = private_api.changes_iterator(loader)
        # Keep the workers of a rehearsal's iterator for the next iterator.
        self._lent = spare and loader.num_workers > 0 and not self._changes
        self._loader = self._rebuild(loader, keep=self._lent)
        self._start: tuple[Position, int] | None = (
            None  # the rest of the epoch is dealt again from this position, after this number of samples of the job
        )

    def _rebuild(self, loader: DataLoader[Any], *, keep: bool) -> DataLoader[Any]:
        dataset: Any = loader.dataset
        wrapper = SeededBatches if hasattr(dataset, "__getitems__") else SeededDataset
        order: dict[str, Any] = (
            {"batch_sampler": self._order} if self._batched else {"sampler": self._order, "batch_size": None}
        )
        made: DataLoader[Any] = DataLoader(
            wrapper(dataset, self._seed),
            num_workers=loader.num_workers,
            collate_fn=loader.collate_fn,
            pin_memory=loader.pin_memory,
            timeout=loader.timeout,
            worker_init_fn=_init_of(loader),
            multiprocessing_context=loader.multiprocessing_context,
            generator=self._generator,
            prefetch_factor=loader.prefetch_factor,
            persistent_workers=keep or self._keeps_workers(),
            pin_memory_device=loader.pin_memory_device,
            in_order=getattr(loader, "in_order", True),
            **order,
        )
        if not self._changes:
            return made
        # A loader of the user's class changes each batch (PyG's loaders). Its constructor may need other arguments.
        of_class = copy.copy(loader)
        vars(of_class).update(vars(made))
        return of_class

    def _keeps_workers(self) -> bool:
        return self._user.persistent_workers or (self._repeats and self._user.num_workers > 0)

    def become(self, draws: Draws) -> None:
        """Draw from the streams ``draws`` from now on."""
        super().become(draws)
        self._order.become(draws)

    def identity(self) -> DataIdentity | None:
        """Return the dataset's identity; it is marked as shared if a sampler deals one dataset to the ranks."""
        deal = self._order.deal
        return identity(self._user.dataset, shared=deal is not None and deal.copies > 1)

    def words(self, position: Position) -> dict[str, int]:
        """Return two numbers of samples for a position.

        ``seen`` is the number of samples of the epoch that the whole job has drawn. ``share`` is the number of samples
        that the job draws with one batch of each copy of the model.
        """
        deal = self._order.deal
        return {} if deal is None else {"seen": self._seen(deal, position), "share": deal.share}

    def _seen(self, deal: OrderDeal, position: Position) -> int:
        if self._start is None or self._start[0].epoch != position.epoch:
            return position.batch * deal.share
        return self._start[1] + (position.batch - self._start[0].batch) * deal.share

    def find(self, place: Mapping[str, int]) -> int:
        """Return the index, within its epoch, of the first batch after the samples that the job has drawn.

        If the last drawn sample is not the last of a batch of the present size, the remaining samples of the epoch are
        dealt to the ranks again.
        """
        deal = self._order.deal
        self._start = None
        if deal is None or "seen" not in place:
            return place["batch"]
        batch, beyond = divmod(place["seen"], deal.share)
        if beyond and self.length is not None and batch < self.length:
            batch = self.length - deal.left(place["seen"])
            self._start = (Position(place["epoch"], batch), place["seen"])
        return batch

    def open(self, epoch: int, skip: int) -> Iterator[Any]:
        """Return an iterator over ``epoch`` that does not load the first ``skip`` batches."""
        user = self._user
        set_epoch(epoch, *samplers_in(user.sampler), *samplers_in(self._inner), user)
        self._order.epoch, self._order.skip = epoch, skip
        self._order.seen = None
        if self._order.deal is not None and self._start is not None and self._start[0].epoch == epoch:
            self._order.seen = self._seen(self._order.deal, Position(epoch, skip))
        self._generator.manual_seed(order_seed(self._seed, epoch, self._draws.torch))
        if not self._keeps_workers() and not self._lent:
            private_api.stop_workers(self._iterator)
            if self._loader.persistent_workers:
                self._loader = self._rebuild(self._user, keep=False)
        self._lent = self._lent and self._iterator is None
        # Not the `__iter__` of a class that repeats its sampler: its iterator is for all epochs.
        self._iterator = DataLoader.__iter__(self._loader)
        made: Iterator[Any] = self._iterator
        return made


def _repeats(loader: DataLoader[Any]) -> bool:
    """Return True if the loader's sampler repeats another sampler without an end, to keep its workers for all epochs.

    The loaders of YOLO (``InfiniteDataLoader``) and timm (``MultiEpochsDataLoader``) do so. One iterator of such a
    loader yields all epochs, so it cannot return to the start of an epoch. Both sampler classes have the same name.
    """
    sampler = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
    return type(sampler).__name__ == "_RepeatSampler" and hasattr(sampler, "sampler")


def _init_of(loader: DataLoader[Any]) -> Callable[[int], None] | None:
    """Return the init function for loader workers, which ends a worker without a parent, or runs the user's function.

    torch's own watch of the parent begins later, and does not notice a parent that was killed before that.
    """
    init = loader.worker_init_fn
    context = loader.multiprocessing_context
    if context is None:  # ask in a way that does not fix the start method for the whole process
        method = (
            multiprocessing.get_start_method(allow_none=True) or multiprocessing.get_all_start_methods()[0]
        )
    else:
        method = context.get_start_method()
    if method != "fork":  # started by a fork server or by a command: the parent cannot be checked
        return init
    parent = os.getpid()

    def begin(worker: int) -> None:
        if os.getppid() != parent:
            os._exit(0)
        if init is not None:
            init(worker)

    return begin


class _PreparedSource(MapSource):
    """A :class:`MapSource` for loaders from ``accelerator.prepare``."""

    def become(self, draws: Draws) -> None:
        """Do nothing: every rank draws the same order as rank 0."""


class StatefulSource(Source):
    """A loader that has its own position (``state_dict``), different on each rank."""

    def __init__(self, loader: Any, seed: int, draws: Draws) -> None:
        super().__init__(loader, seed, draws)
        self._restored = False

    def open(self, epoch: int, skip: int) -> Iterator[Any]:
        """Return an iterator over ``epoch`` from the restored state, or from the start if there is none.

        From the start, the first ``skip`` batches are read and dropped.
        """
        self._begin(epoch)
        first = skip if self._restored else 0
        self._restored = False
        if skip > first:
            log.warning(
                "holdfast: no saved state of the data loader on this rank: reading %s again",
                plural(skip, "batch"),
            )
        return self._read(epoch, first, skip)

    def local_state(self) -> Plain:
        """Return the loader's ``state_dict`` as plain values."""
        return split(self._user.state_dict(), "loader", _inline)

    def restore_local(self, state: Plain) -> None:
        """Load ``state`` as the loader's ``state_dict``."""
        self._user.load_state_dict(join(state, _from_inline))
        self._restored = True


class ReplaySource(Source):
    """An iterable that cannot seek: it is read from its start up to the position."""

    def __init__(self, loader: Any, seed: int, draws: Draws) -> None:
        super().__init__(loader, seed, draws)
        if isinstance(loader, DataLoader) and loader.generator is None:
            loader.generator = torch.Generator()

    def open(self, epoch: int, skip: int) -> Iterator[Any]:
        """Return an iterator over ``epoch``; it reads the first ``skip`` batches and drops them."""
        self._begin(epoch, order_seed(self._seed, epoch, self._draws.torch))
        if skip:
            log.warning(
                "holdfast: %s has no position to go to: reading %s again",
                type(self._user).__name__,
                plural(skip, "batch"),
            )
        return self._read(epoch, 0, skip)


def _inline(value: Any, path: str) -> Plain:
    """Return a small tensor of a loader's state as plain values; None for other objects."""
    if not isinstance(value, torch.Tensor):
        return None
    dtype = str(value.dtype).removeprefix("torch.")
    return {"dtype": dtype, "shape": list(value.shape), "data": byte_view(value).tobytes()}


def _from_inline(value: Plain) -> torch.Tensor:
    flat = torch.frombuffer(bytearray(value["data"]), dtype=torch.uint8)
    return flat.view(getattr(torch, value["dtype"])).reshape(value["shape"])
