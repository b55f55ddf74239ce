"""Steps that take a batch of each of several loaders: ``s.steps(labeled, unlabeled)``."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import chain, cycle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import holdfast
from holdfast.errors import DataError, UnsupportedError, UsageError
from holdfast.frameworks.torch.data.position import TorchFeed, make_source
from holdfast.frameworks.torch.state.rng import Draws, loader_seed
from holdfast.session.loops.combined_feed import CombinedFeed, feed_of, rescaled, together

pytestmark = pytest.mark.torch

Batches = tuple[list[int], ...]


def loader(count: int, first: int = 0, *, shuffle: bool = True, size: int = 2) -> DataLoader[Any]:
    """Return a loader over the numbers from ``first`` on."""
    return DataLoader(TensorDataset(torch.arange(first, first + count)), size, shuffle=shuffle)


def combined(*loaders: Any) -> CombinedFeed:
    """Return the feed of the loaders, as the first rank draws from it."""
    feeds = [
        TorchFeed(make_source(each, loader_seed(3, number), Draws.same(0)))
        for number, each in enumerate(loaders)
    ]
    return CombinedFeed(feeds, [len(each) if hasattr(each, "__len__") else None for each in loaders])


def numbers(drawn: tuple[Any, ...]) -> Batches:
    """Return the numbers of the batches."""
    return tuple(batch[0].tolist() for batch in drawn)


class Counted:
    """Batches without a length: the numbers below ``count``.

    Attributes:
        begun: number of times that they were read.
    """

    def __init__(self, count: int) -> None:
        self.begun = 0
        self._count = count

    def __iter__(self) -> Iterator[list[torch.Tensor]]:
        self.begun += 1
        for number in range(self._count):
            yield [torch.tensor([number])]


class Script:
    """A training on two loaders, of 4 and of 3 batches."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.net = nn.Linear(1, 1)
        self.optimizer = torch.optim.SGD(self.net.parameters(), 0.001, momentum=0.9)
        self.loaders = loader(8), loader(6, 100)

    def session(self, root: Path, **arguments: Any) -> Any:
        """Return a session of this script."""
        return holdfast.session(model=self.net, optimizer=self.optimizer, checkpoint=root, **arguments)

    def update(self, *drawn: tuple[Any, ...]) -> None:
        """Make one update. Each item of ``drawn`` has a batch of each loader."""
        self.optimizer.zero_grad()
        for batches in drawn:
            loss: Any = torch.cat([self.net(batch[0][:, None] / 100) for batch in batches]).square().mean()
            loss.backward()
        self.optimizer.step()

    def train(self, root: Path, until: int, **arguments: int) -> list[Batches]:
        """Train in one loop. Return the numbers of each step."""
        seen = []
        with self.session(root) as s:
            for step in s.steps(*self.loaders, until=until, **arguments):
                with step as drawn:
                    self.update(*(drawn if arguments else [drawn]))
                if step.committed:
                    seen += [numbers(each) for each in (step.batch if arguments else [step.batch])]
        return seen

    def train_epochs(
        self, root: Path, epochs: int, length: int | None = None, *, leave: bool = False
    ) -> list[Batches]:
        """Train in epochs of the first loader, or of ``length`` steps. Return the numbers of each step.

        Args:
            leave: leave the loop of an epoch after ``length`` steps, in place of giving its end.
        """
        seen = []
        with self.session(root) as s:
            for epoch in s.epochs(epochs):
                until = None if length is None or leave else length * (epoch + 1)
                for step in s.steps(*self.loaders, until=until):
                    with step as drawn:
                        self.update(*([drawn] if len(self.loaders) > 1 else [(drawn,)]))
                    if step.committed:
                        seen.append(numbers(step.batch if len(self.loaders) > 1 else (step.batch,)))
                    if step.committed and leave and (step.number + 1) % (length or 1) == 0:
                        break
        return seen


def test_each_further_loader_has_passes_of_its_own() -> None:
    feed = combined(loader(8), loader(6, 100))
    first, second = zip(*(numbers(feed.draw()) for _ in range(12)), strict=True)
    for passed in range(3):
        assert sorted(chain(*first[4 * passed : 4 * passed + 4])) == list(range(8))
    for passed in range(4):
        assert sorted(chain(*second[3 * passed : 3 * passed + 3])) == list(range(100, 106))
    assert len({str(first[at : at + 4]) for at in (0, 4, 8)}) == 3, "each pass has an order of its own"
    assert len({str(second[at : at + 3]) for at in (0, 3, 6, 9)}) == 4


def test_two_loaders_of_one_length_have_different_orders() -> None:
    first, second = numbers(combined(loader(64, size=32), loader(64, size=32)).draw())
    assert first != second


def test_the_first_loader_ends_the_epoch() -> None:
    feed, drawn = combined(loader(8), loader(6, 100)), list[tuple[int, bool]]()
    with pytest.raises(StopIteration):
        while True:
            feed.draw(2)
            drawn.append((feed.epoch, feed.last_in_epoch))
    assert drawn == [(epoch, batch == 3) for epoch in range(2) for batch in range(4)]


@pytest.mark.parametrize("seed", range(12))
def test_a_position_gives_the_same_batches_again(seed: int) -> None:
    rng = random.Random(seed)
    loaders = [
        loader(rng.randint(2, 20), shuffle=rng.random() < 0.7, size=rng.randint(1, 3)) for _ in range(3)
    ]
    feed, places, drawn = combined(*loaders), list[Any](), list[Batches]()
    for _ in range(30):
        places.append(dict(feed.place()))
        drawn.append(numbers(feed.draw()))
    again = combined(*loaders)
    for at in rng.sample(range(30), 6):
        again.seek(places[at])
        assert again.place() == places[at]
        assert [numbers(again.draw()) for _ in drawn[at:]] == drawn[at:]


@pytest.mark.parametrize("epoch", [1, 2, 5])
def test_an_epoch_of_the_script_begins_where_one_loop_would_be(epoch: int) -> None:
    one, other = combined(loader(8), loader(6, 100)), combined(loader(8), loader(6, 100))
    for _ in range(4 * epoch):
        one.draw()
    other.seek({"epoch": epoch, "batch": 0})
    assert [numbers(one.draw()) for _ in range(9)] == [numbers(other.draw()) for _ in range(9)]


def test_epochs_and_one_loop_draw_the_same(tmp_path: Path) -> None:
    (tmp_path / "epochs").mkdir()
    (tmp_path / "loop").mkdir()
    assert Script().train_epochs(tmp_path / "epochs", 3) == Script().train(tmp_path / "loop", 12)


@pytest.mark.parametrize("arguments", [{}, {"batches": 2}])
def test_a_resumed_job_continues_in_both_loaders(tmp_path: Path, arguments: dict[str, int]) -> None:
    (tmp_path / "once").mkdir()
    (tmp_path / "twice").mkdir()
    calm, script = Script(), Script()
    seen = calm.train(tmp_path / "once", 11, **arguments)
    parts = script.train(tmp_path / "twice", 5, **arguments)
    resumed = Script()
    assert parts + resumed.train(tmp_path / "twice", 11, **arguments) == seen
    assert torch.equal(resumed.net.weight, calm.net.weight)


def test_a_second_loader_is_other_data_than_the_checkpoint_had(tmp_path: Path) -> None:
    """If the user accepts that, each loader continues as if it had been there from the start."""
    root = tmp_path / "one"
    root.mkdir()
    script = Script()
    with script.session(root) as s:
        for step in s.steps(script.loaders[0], until=5):
            with step as batch:
                script.update((batch,))
    (tmp_path / "both").mkdir()
    expected = Script().train(tmp_path / "both", 6)[5]
    with pytest.raises(DataError, match="another loader of the loop"):
        Script().train(root, 6)
    script = Script()
    with script.session(root, verify_data=False) as s:
        for step in s.steps(*script.loaders, until=6):
            with step as drawn:
                script.update(drawn)
            if step.committed:
                assert numbers(step.batch) == expected


@pytest.mark.parametrize("length", [1, 3, 5, 9])
@pytest.mark.parametrize("several", [True, False])
def test_epochs_of_a_number_of_steps_continue_in_the_data(tmp_path: Path, length: int, several: bool) -> None:
    """Regression: each epoch began another pass, so it left out the rest of a pass, or repeated another."""
    (tmp_path / "epochs").mkdir()
    (tmp_path / "loop").mkdir()
    one, other = Script(), Script()
    if not several:
        one.loaders, other.loaders = one.loaders[:1], other.loaders[:1]  # type: ignore[assignment]
    told = one.train_epochs(tmp_path / "epochs", 3, length)
    with other.session(tmp_path / "loop") as s:
        for step in s.steps(*other.loaders, until=3 * length):
            with step as drawn:
                other.update(drawn if several else (drawn,))
            if step.committed:
                assert numbers(step.batch if several else (step.batch,)) == told[step.number]
    assert len(told) == 3 * length and torch.equal(one.net.weight, other.net.weight)


@pytest.mark.parametrize("first", [1, 2])
@pytest.mark.parametrize("last", ["map", "replay"])
def test_a_resumed_epoch_of_steps_continues_in_the_data(tmp_path: Path, first: int, last: str) -> None:
    (tmp_path / "once").mkdir()
    (tmp_path / "twice").mkdir()
    script, calm, resumed = Script(), Script(), Script()
    if last == "replay":
        for each in (script, calm, resumed):
            each.loaders = (each.loaders[0], Counted(7))  # type: ignore[assignment]
    seen = calm.train_epochs(tmp_path / "once", 4, 3)
    parts = script.train_epochs(tmp_path / "twice", first, 3)
    assert parts + resumed.train_epochs(tmp_path / "twice", 4, 3) == seen
    assert torch.equal(resumed.net.weight, calm.net.weight)


def test_an_epoch_that_is_left_early_leaves_further_loaders_where_they_are(tmp_path: Path) -> None:
    """The first loader begins its next pass, as in a script that iterates it again and keeps the other iterator."""
    (tmp_path / "once").mkdir()
    (tmp_path / "loop").mkdir()
    first, second = zip(*Script().train_epochs(tmp_path / "once", 4, 3, leave=True), strict=True)
    passes, stream = zip(*Script().train(tmp_path / "loop", 16), strict=True)
    assert list(first) == [batch for at, batch in enumerate(passes) if at % 4 < 3]
    assert list(second) == list(stream[:12])


def test_other_data_begin_at_their_epoch(tmp_path: Path) -> None:
    """A position in the data of the epoch before has no meaning there."""
    script, drawn = Script(), []
    with script.session(tmp_path) as s:
        for epoch in s.epochs(2):
            for step in s.steps(loader(8 + 4 * epoch, shuffle=False), until=3 * (epoch + 1)):
                with step as batch:
                    script.update((batch,))
                if step.committed:
                    drawn.append(step.batch[0].tolist())
    assert drawn == 2 * [[0, 1], [2, 3], [4, 5]]


@pytest.mark.parametrize("length", [None, 3])
def test_a_loader_without_a_length_continues_in_epochs(tmp_path: Path, length: int | None) -> None:
    """It has no position, and is not read again at each epoch."""
    script, endless = Script(), Counted(5)
    script.loaders = (script.loaders[0], endless)  # type: ignore[assignment]
    drawn = [batches[1][0] for batches in script.train_epochs(tmp_path, 3, length)]
    assert drawn == [number % 5 for number in range(len(drawn))] and len(drawn) == 3 * (length or 4)
    assert endless.begun == 1 + (len(drawn) - 1) // 5, "one pass is read once"


def test_the_position_of_a_loader_without_a_length_is_not_known_in_epochs() -> None:
    """A checkpoint of a job with one loader does not have it."""
    with pytest.raises(UsageError, match="loader 2 at the start of an epoch is not known"):
        combined(loader(8), Counted(5)).seek({"epoch": 1, "batch": 0})


def test_a_loader_without_a_length_has_passes_in_one_loop(tmp_path: Path) -> None:
    script = Script()
    script.loaders = (script.loaders[0], Counted(5))  # type: ignore[assignment]
    with script.session(tmp_path) as s:
        drawn = []
        for step in s.steps(*script.loaders, until=7):
            with step as (batch, (number,)):
                script.update((batch,))
            if step.committed:
                drawn.append(int(number))
    assert drawn == [0, 1, 2, 3, 4, 0, 1]


@pytest.mark.parametrize("given", [(None, [1]), ([1], None)])
def test_none_in_place_of_a_loader_is_refused(given: tuple[Any, Any]) -> None:
    with pytest.raises(UsageError, match="None in place of one of several loaders"):
        together(given[0], given[1:])


def test_a_framework_that_combines_datasets_itself_is_named() -> None:
    class Other:
        """An adapter of another framework."""

    with pytest.raises(UnsupportedError, match="several loaders") as refused:
        feed_of(Other(), together([1], [[2]]), None)  # type: ignore[arg-type]
    assert "tf.data.Dataset.zip" in refused.value.hint


@pytest.mark.parametrize("made", ["zip", "cycle"])
def test_an_iterator_over_several_loaders_is_refused_with_the_way(tmp_path: Path, made: str) -> None:
    given: Any = zip(loader(4), loader(4), strict=True) if made == "zip" else cycle(loader(4))
    with Script().session(tmp_path) as s, pytest.raises(UsageError) as refused:
        list(s.steps(given))
    assert "several loaders: s.steps(loader, second)" in refused.value.hint


@pytest.mark.parametrize(
    "given", [(loader(4), loader(4)), [loader(4)], {"labeled": loader(4), "other": loader(4)}]
)
def test_a_container_of_loaders_is_refused_with_the_way(tmp_path: Path, given: Any) -> None:
    with (
        Script().session(tmp_path) as s,
        pytest.raises(UsageError, match="take each loader as a batch") as refused,
    ):
        list(s.steps(given))
    assert "s.steps(labeled, unlabeled)" in refused.value.hint


def test_an_object_around_an_iterator_is_refused_with_the_way(tmp_path: Path) -> None:
    class Forever:
        """Batches of a loader without an end, which have ``next()`` alone."""

        def __next__(self) -> list[torch.Tensor]:
            return [torch.zeros(1)]

    with Script().session(tmp_path) as s, pytest.raises(UsageError, match="type Forever, which") as refused:
        list(s.steps(loader(4), Forever()))
    assert "several loaders: s.steps(loader, second)" in refused.value.hint


def test_a_job_with_fewer_ranks_assumes_that_samples_were_dealt_in_turn() -> None:
    at = {"epoch": 1, "batch": 6, "1.epoch": 0, "1.batch": 4, "1.seen": 32, "2.epoch": 3, "2.batch": 2}
    assert rescaled(at, 4, 2) == {**at, "batch": 12, "2.batch": 4}
    assert rescaled(at, 2, 2) == at
