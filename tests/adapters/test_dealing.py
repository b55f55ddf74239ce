"""A job with another number of ranks, or another batch size, continues at the same sample: none is lost or repeated."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    Sampler,
    SubsetRandomSampler,
)

from holdfast.frameworks.torch.data.position import TorchFeed, make_source
from holdfast.frameworks.torch.state.rng import Draws

pytestmark = pytest.mark.torch


class Numbers(Dataset[int]):
    """The dataset 0, 1, 2, ..."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        return index


def job(length: int, ranks: int, batch: int, drop_last: bool = False) -> list[TorchFeed]:
    """Return one feed per rank, shuffled as torch does it."""
    data = Numbers(length)
    feeds = []
    for rank in range(ranks):
        sampler: Sampler[Any] = DistributedSampler(data, ranks, rank, seed=3, drop_last=drop_last)
        loader = DataLoader(data, batch, sampler=sampler, drop_last=drop_last)
        feeds.append(TorchFeed(make_source(loader, 7, Draws.same(rank))))
    return feeds


class Drawn:
    """The order of a sampler in the place of a dataset, as Fabric and Lightning give it to ``DistributedSampler``."""

    def __init__(self, sampler: Sampler[int]) -> None:
        self._sampler = sampler
        self.order: list[int] = []

    def __len__(self) -> int:
        return len(self._sampler)  # type: ignore[arg-type]


class Dealer(DistributedSampler[Any]):
    """A sampler that deals the order which another sampler draws."""

    dataset: Any

    def __iter__(self) -> Any:
        self.dataset.order = list(self.dataset._sampler)
        return (self.dataset.order[at] for at in super().__iter__())


def dealt(length: int, ranks: int, batch: int, *, seeded: bool) -> list[TorchFeed]:
    """Return one feed per rank over a sampler that has a generator, or draws from the default one."""
    data, feeds = Numbers(length), []
    for rank in range(ranks):
        drawn = Drawn(
            SubsetRandomSampler(range(length), torch.Generator().manual_seed(5) if seeded else None)
        )
        loader = DataLoader(data, batch, sampler=Dealer(drawn, ranks, rank))  # type: ignore[arg-type]
        feeds.append(TorchFeed(make_source(loader, 7, Draws.same(rank))))
    return feeds


def draw(feeds: list[TorchFeed], batches: int | None = None) -> list[int]:
    """Return the samples of all ranks in ``batches`` batches each, or up to the end of the first epoch.

    All ranks must end the epoch together.
    """
    out: list[int] = []
    while batches is None or batches > 0:
        before = out.copy()
        for feed in feeds:
            out += torch.as_tensor(feed.draw()).tolist()
        if len({(feed.epoch, feed.last_in_epoch) for feed in feeds}) != 1:
            raise AssertionError("one rank has a batch more than another")
        if feeds[0].epoch > 0:  # the epoch had ended before
            return before
        if batches is not None:
            batches -= 1
        elif feeds[0].last_in_epoch:
            return out
    return out


@settings(max_examples=150, deadline=None)
@given(
    length=st.integers(20, 60),
    lives=st.lists(st.tuples(st.integers(1, 5), st.integers(1, 4)), min_size=2, max_size=4),
    batches=st.integers(1, 4),
)
def test_every_sample_comes_once(length: int, lives: list[tuple[int, int]], batches: int) -> None:
    seen: list[int] = []
    place: dict[str, int] = {"epoch": 0, "batch": 0, "seen": 0, "share": 1}
    for number, (ranks, batch) in enumerate(lives):
        feeds = job(length, ranks, batch)
        for feed in feeds:
            feed.seek(place)
        last = number == len(lives) - 1
        if not last and batches * ranks * batch >= length - place["seen"]:
            continue
        seen += draw(feeds, None if last else batches)
        place = feeds[0].place()
        assert all(feed.place() == place for feed in feeds)
    counts = Counter(seen)
    assert set(counts) == set(range(length))
    assert (
        counts.total() - length < lives[-1][0]
    )  # repeated so that all ranks get the same number, as the sampler does


@given(length=st.integers(20, 60), sizes=st.tuples(st.integers(1, 5), st.integers(1, 5)))
def test_with_drop_last_less_than_one_step_is_left_out(length: int, sizes: tuple[int, int]) -> None:
    first, second = job(length, sizes[0], 2, drop_last=True), job(length, sizes[1], 3, drop_last=True)
    seen = draw(first, 1)
    for feed in second:
        feed.seek(first[0].place())
    seen += draw(second)
    assert len(seen) == len(set(seen))
    assert length - len(seen) < 3 * sizes[1] + sizes[1]


def test_dealing_anew_is_skipping_where_both_are_possible() -> None:
    first = job(48, 4, 2)
    draw(first, 3)
    place = first[0].place()
    assert (place["seen"], place["share"]) == (24, 8)
    (alone,) = job(48, 1, 4)
    alone.seek(place)
    whole = job(48, 1, 4)
    assert draw(whole, 6) + draw([alone]) == draw(job(48, 1, 4))


def test_the_next_epoch_is_whole_again() -> None:
    first = job(20, 3, 2)
    draw(first, 2)
    second = job(20, 2, 3)
    for feed in second:
        feed.seek(first[0].place())
    draw(second)
    torch_order: list[list[int]] = [
        list(DistributedSampler(Numbers(20), 2, rank, seed=3)) for rank in range(2)
    ]
    for rank, feed in enumerate(second):
        sampler: DistributedSampler[Any] = DistributedSampler(Numbers(20), 2, rank, seed=3)
        sampler.set_epoch(1)
        assert torch.as_tensor(feed.draw()).tolist() == list(sampler)[:3] != torch_order[rank][:3]
        assert feed.place()["seen"] == 6


@pytest.mark.parametrize("seeded", [False, True])
def test_ranks_deal_one_order_of_another_sampler(seeded: bool) -> None:
    """Regression: each rank drew a different order, or a replacement drew another one than the lost process."""
    feeds = dealt(24, 2, 3, seeded=seeded)
    first, second = draw(feeds), [torch.as_tensor(feed.draw()).tolist() for feed in feeds]
    assert sorted(first) == list(range(24))
    late = dealt(24, 2, 3, seeded=seeded)
    for feed in late:
        feed.seek({"epoch": 1, "batch": 0})
    assert [torch.as_tensor(feed.draw()).tolist() for feed in late] == second
    place = late[0].place()
    other = dealt(24, 3, 2, seeded=seeded)  # six samples of the epoch are drawn: the others are dealt again
    for feed in other:
        feed.seek(place)
    rest = [number for _ in range(3) for feed in other for number in torch.as_tensor(feed.draw()).tolist()]
    assert sorted(rest + second[0] + second[1]) == list(range(24))


def test_a_sampler_that_is_not_dealt_gives_every_rank_the_same_place() -> None:
    data = Numbers(20)
    feed = TorchFeed(make_source(DataLoader(data, 4), 7, Draws.same(0)))
    feed.draw()
    again = TorchFeed(make_source(DataLoader(data, 3), 7, Draws.same(1)))
    again.seek(feed.place())
    assert [torch.as_tensor(again.draw()).tolist() for _ in range(2)] == [[4, 5, 6], [7, 8, 9]]


def test_what_deals_in_another_way_keeps_its_batch_number() -> None:
    class Buckets(BatchSampler):
        """A sampler of the user's own."""

    data = Numbers(20)
    feed = TorchFeed(
        make_source(DataLoader(data, batch_sampler=Buckets(range(20), 4, False)), 7, Draws.same(0))
    )
    feed.draw()
    assert set(feed.place()) == {"epoch", "batch"}
    feed.seek({"epoch": 0, "batch": 2, "seen": 999, "share": 1})
    assert torch.as_tensor(feed.draw()).tolist() == [8, 9, 10, 11]


def test_epochs_follow_each_other() -> None:
    feeds = job(12, 2, 3)
    epochs = []
    for _ in range(5):
        draw(feeds, 1)
        epochs.append(feeds[0].epoch)
    assert all(b - a in (0, 1) for a, b in pairwise(epochs)) and epochs[-1] == 2
