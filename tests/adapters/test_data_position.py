"""Data position: the same batches from any place, without a read of the skipped samples."""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    WeightedRandomSampler,
)

from holdfast.errors import EmptyLoaderError, UsageError
from holdfast.frameworks.torch.data.position import (
    MapSource,
    ReplaySource,
    StatefulSource,
    TorchFeed,
    make_source,
)
from holdfast.frameworks.torch.state.rng import Draws, mix, reseed, sample_seed, seed_all
from holdfast.store.format.json_values import decode_values, encode_values

pytestmark = pytest.mark.torch
LENGTH = 14


class Items(Dataset[list[float]]):
    """A dataset of the index and three random numbers from the default generators, which counts its reads."""

    def __init__(self) -> None:
        self.read: list[int] = []

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> list[float]:
        self.read.append(index)
        return [float(index), float(torch.rand(())), random.random(), float(np.random.rand())]


class _RepeatSampler:
    """The sampler of YOLO's ``InfiniteDataLoader`` and of timm's ``MultiEpochsDataLoader``."""

    def __init__(self, sampler: Any) -> None:
        self.sampler = sampler

    def __iter__(self) -> Iterator[Any]:
        while True:
            yield from iter(self.sampler)


class Endless(DataLoader[Any]):
    """YOLO's loader: one iterator, made at the beginning, for all epochs. Without batches it is timm's."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        name = "sampler" if self.batch_sampler is None else "batch_sampler"
        object.__setattr__(self, name, _RepeatSampler(getattr(self, name)))
        self.iterator = super().__iter__()

    def __len__(self) -> int:
        repeating: Any = self.sampler if self.batch_sampler is None else self.batch_sampler
        return len(repeating.sampler)

    def __iter__(self) -> Any:
        for _ in range(len(self)):
            yield next(self.iterator)


class Stream(IterableDataset[float]):
    """A stream of ten numbers with noise."""

    def __iter__(self) -> Iterator[float]:
        for number in range(10):
            yield number + float(torch.rand(()))


class _Once:
    """A sampler around a batch sampler, as those of maskrcnn-benchmark."""

    def __init__(self, batch_sampler: Any) -> None:
        self.batch_sampler = batch_sampler

    def __len__(self) -> int:
        return len(self.batch_sampler)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batch_sampler)


class _Negated:
    """PyG's iterator, which changes each batch in this process. Workers that stay get the next epoch by ``_reset``."""

    def __init__(self, iterator: Any) -> None:
        self.iterator = iterator

    def _reset(self, loader: Any, first_iter: bool = False) -> None:
        self.iterator._reset(loader, first_iter)

    def __next__(self) -> Any:
        return [-values for values in next(self.iterator)]


class Negated(DataLoader[Any]):
    """A loader like PyG's ``NodeLoader``, which changes its batches in ``_get_iterator``."""

    def _get_iterator(self) -> Any:
        return _Negated(super()._get_iterator())


class Generated(DataLoader[Any]):
    """A loader whose class defines ``__iter__``, as the ``DataLoaderX`` of many scripts does."""

    def __iter__(self) -> Any:
        yield from super().__iter__()


class Around:
    """A loader around another one, as timm's ``PrefetchLoader``."""

    def __init__(self, loader: Any) -> None:
        self.inner = {"train": [loader]}

    def __iter__(self) -> Iterator[Any]:
        for loader in self.inner["train"]:
            yield from loader


def loaders(workers: int) -> dict[str, Any]:
    """Return one loader of each kind."""
    data = Items()
    common: dict[str, Any] = {"num_workers": workers}
    shuffled: Any = RandomSampler(data, generator=torch.Generator().manual_seed(5))
    return {
        "plain": DataLoader(data, 3, **common),
        "shuffle": DataLoader(data, 3, shuffle=True, drop_last=True, **common),
        "generator": DataLoader(data, batch_sampler=BatchSampler(shuffled, 3, False), **common),
        "distributed": DataLoader(data, 3, sampler=DistributedSampler(data, 2, 1), **common),
        "weighted": DataLoader(data, 3, sampler=WeightedRandomSampler([1.0] * LENGTH, 9), **common),
        "unbatched": DataLoader(data, batch_size=None, **common),
        "endless": Endless(data, 3, shuffle=True, **common),
        "endless distributed": Endless(data, 3, sampler=DistributedSampler(data, 2, 1), **common),
        "endless unbatched": Endless(data, batch_size=None, **common),
        "negated": Negated(data, 3, sampler=DistributedSampler(data, 2, 1), **common),
        "generated": Generated(data, 3, sampler=DistributedSampler(data, 2, 1), **common),
        "around": Around(DataLoader(data, 3, shuffle=True, generator=torch.Generator(), **common)),
        "stream": DataLoader(Stream(), 3, **common),
        "list": [torch.tensor([float(n)]) for n in range(4)],
    }


def draw(feed: TorchFeed, count: int) -> list[Any]:
    """Return batches as nested lists."""
    out: list[Any] = []
    for _ in range(count):
        torch.rand(len(out) + 1)  # random numbers that a training draws between batches must not matter
        out.append(
            torch.as_tensor([[float(v) for v in torch.as_tensor(c).flatten()] for c in feed.draw()]).tolist()
        )
    return out


@pytest.mark.parametrize("kind", list(loaders(0)))
def test_same_batches_from_any_place(kind: str) -> None:
    whole = TorchFeed(make_source(loaders(0)[kind], 1, Draws.same(0)))
    count = 16
    batches = draw(whole, count)
    assert whole.place()["epoch"] >= 1
    for start in (1, 4, 7):
        first = TorchFeed(make_source(loaders(0)[kind], 1, Draws.same(0)))
        draw(first, start)
        place = first.place()
        seed_all(start)
        second = TorchFeed(make_source(loaders(0)[kind], 1, Draws.same(0)))
        second.seek(place)
        assert draw(second, count - start) == batches[start:]


def test_worker_processes_do_not_change_the_data() -> None:
    for kind in ("shuffle", "distributed", "endless"):
        here, there = (TorchFeed(make_source(loaders(n)[kind], 1, Draws.same(0))) for n in (0, 2))
        assert draw(here, 4) == draw(there, 4)
        there.close()


def test_a_loader_that_repeats_keeps_its_workers_and_gets_the_epoch() -> None:
    """YOLO's loader draws the first batches of each epoch before ``set_epoch``; the session draws them after it."""
    loader: Any = loaders(2)["endless distributed"]
    feed, other = (
        TorchFeed(make_source(each, 1, Draws.same(1))) for each in (loader, loaders(0)["distributed"])
    )
    source: Any = feed._source
    assert isinstance(source, MapSource) and source.length == len(loader) == 3
    ours = draw(feed, 3)
    workers = [worker.pid for worker in source._iterator._workers]
    ours += draw(feed, 3)
    assert ours == draw(other, 6) and ours[:3] != ours[3:]
    assert [worker.pid for worker in source._iterator._workers] == workers
    feed.close()


@pytest.mark.parametrize("workers", [0, 1])
def test_a_loader_that_changes_its_batches_keeps_doing_so(workers: int) -> None:
    """The session makes a loader with the user's settings again, which lost what the user's class adds."""
    sampler: Any = DistributedSampler(Items(), 2, 1)
    settings: dict[str, Any] = {"sampler": sampler, "num_workers": workers, "persistent_workers": workers > 0}
    feed, plain = (
        TorchFeed(make_source(kind(Items(), 3, **settings), 1, Draws.same(0)))
        for kind in (Negated, DataLoader)
    )
    assert draw(feed, 6) == [[[-value for value in each] for each in batch] for batch in draw(plain, 6)]
    feed.close()
    plain.close()


@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize("kind", [Generated, lambda *args, **more: Around(DataLoader(*args, **more))])
def test_a_loader_that_is_read_again_gets_the_epoch(kind: Any, batched: bool) -> None:
    """Without it each epoch has the order of the first one."""
    sampler: Any = DistributedSampler(Items(), 2, 1)
    more: dict[str, Any] = (
        {"batch_sampler": BatchSampler(sampler, 7, False)} if batched else {"sampler": sampler}
    )
    feed = TorchFeed(
        make_source(kind(Items(), **({} if batched else {"batch_size": 7}), **more), 1, Draws.same(0))
    )
    for epoch in range(3):
        ours = [int(i) for i in feed.draw()[0]]
        sampler.set_epoch(epoch)
        assert ours == list(sampler)


@pytest.mark.parametrize(
    "kind", [DataLoader, Generated, lambda *args, **more: Around(DataLoader(*args, **more))]
)
def test_workers_that_a_stream_keeps_begin_each_epoch_as_a_new_process_does(kind: Any) -> None:
    def feed() -> TorchFeed:
        loader = kind(Stream(), 5, num_workers=1, persistent_workers=True)
        return TorchFeed(make_source(loader, 1, Draws.same(0)))

    whole, resumed = feed(), feed()
    batches = [whole.draw().tolist() for _ in range(6)]
    resumed.seek({"epoch": 2, "batch": 1})
    assert resumed.draw().tolist() == batches[5]
    whole.close()
    resumed.close()


def test_skipped_samples_are_not_read() -> None:
    loader = loaders(0)["plain"]
    feed = TorchFeed(make_source(loader, 1, Draws.same(0)))
    feed.seek({"epoch": 2, "batch": 3})
    feed.draw()
    assert loader.dataset.read == [9, 10, 11]


def test_order_is_a_function_of_seed_and_epoch() -> None:
    def order(seed: int, rank: int = 0, epoch: int = 0) -> Any:
        loader = loaders(0)["shuffle"]
        feed = TorchFeed(make_source(loader, seed, Draws.same(rank)))
        feed.seek({"epoch": epoch, "batch": 0})
        return [b[0] for b in draw(feed, 4)]

    assert order(1) == order(1)
    assert order(1) != order(2) and order(1) != order(1, epoch=1) and order(1) != order(1, rank=1)


def test_distributed_order_is_torchs_own() -> None:
    data = Items()
    sampler: DistributedSampler[Any] = DistributedSampler(data, 2, 1, seed=3)
    feed = TorchFeed(make_source(DataLoader(data, 2, sampler=sampler), 1, Draws.same(1)))
    feed.seek({"epoch": 4, "batch": 0})
    ours = [int(i) for _ in range(3) for i in feed.draw()[0]]
    sampler.set_epoch(4)
    assert ours == list(sampler)[:6]


def test_epochs_and_ends() -> None:
    feed = TorchFeed(make_source(loaders(0)["plain"], 1, Draws.same(0)))
    seen = []
    for _ in range(6):
        feed.draw()
        seen.append((feed.epoch, feed.last_in_epoch))
    assert seen == [(0, False)] * 4 + [(0, True), (1, False)]
    short = TorchFeed(make_source(loaders(0)["plain"], 1, Draws.same(0)))
    for _ in range(5):
        short.draw(1)
    with pytest.raises(StopIteration):
        short.draw(1)
    empties: list[Any] = [[], DataLoader(Items(), 20, drop_last=True)]
    for empty in empties:
        with pytest.raises(EmptyLoaderError, match="no batch"):
            TorchFeed(make_source(empty, 1, Draws.same(0))).draw()
    with pytest.raises(UsageError, match="iterator"):
        make_source(iter([1]), 1, Draws.same(0))
    with pytest.raises(UsageError, match="a OneShot, a DataLoader that is its own iterator") as own:
        make_source(OneShot(Items()), 1, Draws.same(0))
    assert "sampler=loader.sampler" in str(own.value.hint)
    with pytest.raises(UsageError, match="cannot be iterated"):
        make_source(3, 1, Draws.same(0))


class OneShot(DataLoader[Any]):
    """picotron's loader: it is its own iterator."""

    def __iter__(self) -> Any:
        return self

    def __next__(self) -> Any:
        raise StopIteration


def test_replay_warns(caplog: pytest.LogCaptureFixture) -> None:
    source = make_source(loaders(0)["stream"], 1, Draws.same(0))
    assert isinstance(source, ReplaySource)
    feed = TorchFeed(source)
    feed.seek({"epoch": 0, "batch": 2})
    with caplog.at_level(logging.WARNING, "holdfast"):
        feed.draw()
    assert "reading 2 batches again" in caplog.text
    assert isinstance(make_source(loaders(0)["plain"], 1, Draws.same(0)), MapSource)


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
def test_stateful_loader(workers: int) -> None:
    from torchdata.stateful_dataloader import StatefulDataLoader

    def feed() -> TorchFeed:
        torch.manual_seed(0)  # the sampler draws a seed when it is constructed
        loader = StatefulDataLoader(list(range(12)), batch_size=3, shuffle=True, num_workers=workers)
        source = make_source(loader, 1, Draws.same(0))
        assert isinstance(source, StatefulSource)
        return TorchFeed(source)

    whole = feed()
    batches = [whole.draw().tolist() for _ in range(7)]
    whole.close()
    first = feed()
    for _ in range(2):
        first.draw()
    place, local = first.place(), decode_values(encode_values({"l": first.local_state()}))
    first.close()
    assert isinstance(local, dict)
    second = feed()
    second.seek(place, local["l"])
    assert [second.draw().tolist() for _ in range(5)] == batches[2:]
    second.close()


def test_seeds() -> None:
    assert mix(1, 2) != mix(2, 1) and mix(0) != mix(0, 0)
    seeds = {sample_seed(1, e, i) for e in range(20) for i in range(200)}
    assert len(seeds) == 4000 and all(0 <= s < 2**63 for s in seeds)
    reseed(1, Draws.same(0), 5)
    first = torch.rand(2), random.random(), np.random.rand()
    reseed(1, Draws.same(0), 5)
    assert torch.equal(first[0], torch.rand(2)) and first[1:] == (random.random(), np.random.rand())


def test_second_feed_of_a_loader_draws_what_a_new_process_would() -> None:
    def made() -> DataLoader[Any]:
        generator = torch.Generator().manual_seed(5)
        return DataLoader(Items(), 3, sampler=RandomSampler(Items(), generator=generator))

    def order(loader: DataLoader[Any]) -> list[float]:
        feed = TorchFeed(make_source(loader, 1, Draws.same(0)))
        return [x for _ in range(8) for x in feed.draw()[0].tolist()]

    loader = made()
    first = order(loader)
    assert order(loader) == first == order(made())
    loader.sampler.generator.manual_seed(6)  # type: ignore[attr-defined]
    assert order(loader) != first


class Adapted:
    """A loader as accelerate makes it: ``isinstance`` takes it for a DataLoader, and its class is none."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        self.loader = loader

    @property  # type: ignore[misc]  # as accelerate does
    def __class__(self) -> type:
        return DataLoader

    def __getattr__(self, name: str) -> Any:
        return getattr(self.loader, name)


def test_an_adapter_around_a_loader_is_read_as_the_loader() -> None:
    """Regression: the search for iterators of the user's class ended Hugging Face's trainers with an error."""
    adapted: Any = Adapted(DataLoader(Items(), 4))
    assert isinstance(adapted, DataLoader)
    feed = TorchFeed(MapSource(adapted, 3, Draws.same(0)))
    assert [int(index) for index in feed.draw()[0]] == [0, 1, 2, 3]
