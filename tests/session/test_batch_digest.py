"""Batch digests: a process must draw the same batches as the process before it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

import holdfast
from holdfast.errors import DataError
from holdfast.exit_codes import Exit
from holdfast.frameworks.common.optional_abilities import Copy
from holdfast.frameworks.torch.data.batch_digest import digest_of_batch
from holdfast.session.loops.batch_digest import Drawn
from tests.session.launch import run_job

pytestmark = pytest.mark.torch

JOB = str(Path(__file__).with_name("drawn_job.py"))
STEPS = 4


@pytest.mark.processes
@pytest.mark.parametrize("where", ["block", "update", pytest.param("behind", marks=pytest.mark.more)])
def test_a_replacement_that_draws_other_batches_ends_the_run(tmp_path: Path, where: str) -> None:
    """Regression: the job continued with other weights, and ended with exit code 0."""
    done = run_job(tmp_path, 2, JOB, where)
    assert (tmp_path / "struck").exists() and done.returncode == Exit.BAD_INPUT, done.stdout
    assert f"rank 1: the Counting gives another batch for step {STEPS + 1}" in done.stdout, done.stdout


# ---------------------------------------------------------------------- one process


class Rows(Dataset[torch.Tensor]):
    """A dataset in which one row may be changed."""

    def __init__(self, count: int = 2 * STEPS, changed: int = -1) -> None:
        self._rows = torch.randn(count, 4, generator=torch.Generator().manual_seed(3))
        self._changed = changed

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self._rows[index] + float(index == self._changed)


class Stream(IterableDataset[torch.Tensor]):
    """A stream of the same rows, without indices. One row may be changed."""

    def __init__(self, changed: int = -1) -> None:
        self._changed = changed

    def __iter__(self) -> Iterator[torch.Tensor]:
        rows = Rows(changed=self._changed)
        yield from (rows[index] for index in range(len(rows)))


def train(root: Path, loader: Any, until: int, batches: int | None = None, **arguments: Any) -> list[float]:
    """Run a job up to a step. Return the sums of the batches of its blocks."""
    torch.manual_seed(0)
    net, seen = nn.Linear(4, 1), []
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    given: dict[str, Any] = {"model": net, "optimizer": optimizer, "checkpoint": root, "verify_block": 0}
    with holdfast.session(**{**given, **arguments}) as s:
        for step in s.steps(loader, until=until, batches=batches):
            with step as drawn:
                for x in [drawn] if batches is None else drawn:
                    seen.append(float(x.sum()))
                    net(x).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        assert s.step == until
    return seen


def test_a_dataset_that_was_changed_behind_the_checkpoint_is_an_error(tmp_path: Path) -> None:
    """A change in the batch before the checkpoint is found. The error names the loader and its sampler."""
    train(tmp_path, DataLoader(Rows(), 2), 3)
    with pytest.raises(
        DataError, match="the DataLoader with a SequentialSampler gives another batch for step 2"
    ):
        train(tmp_path, DataLoader(Rows(changed=5), 2), 5)
    assert len(train(tmp_path, DataLoader(Rows(changed=5), 2), 5, verify_data=False)) == 2


def test_the_advice_about_a_stream_names_no_sampler(tmp_path: Path) -> None:
    train(tmp_path, DataLoader(Stream(), 2), 3)
    with pytest.raises(DataError, match="the DataLoader gives another batch for step 2") as raised:
        train(tmp_path, DataLoader(Stream(changed=5), 2), 5)
    assert raised.value.hint is not None
    assert "shuffle it with a fixed seed" in raised.value.hint and "sampler" not in raised.value.hint


@pytest.mark.parametrize("until", [3, STEPS, STEPS + 1])
@pytest.mark.parametrize("batches", [None, 2])
@pytest.mark.parametrize("stream", [False, True])
def test_the_same_data_is_no_error_wherever_the_job_is(
    tmp_path: Path, until: int, batches: int | None, stream: bool
) -> None:
    """The job is inside an epoch, at its end or after it. The comparison leaves the feed at its position."""

    def loader() -> Any:
        return DataLoader(Stream(), 2) if stream else DataLoader(Rows(), 2, shuffle=True)

    begun = train(tmp_path / "stopped", loader(), until, batches)
    rest = train(tmp_path / "stopped", loader(), 2 * STEPS, batches)
    assert begun + rest == train(tmp_path / "whole", loader(), 2 * STEPS, batches)


def test_more_epochs_are_no_other_data(tmp_path: Path) -> None:
    """A later start may ask for more epochs, because their number is a bound of its loop and no part of the data."""
    for rounds in (2, 3):
        torch.manual_seed(0)
        net = nn.Linear(4, 1)
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        with holdfast.session(model=net, optimizer=optimizer, checkpoint=tmp_path, verify_block=0) as s:
            for _ in s.epochs(rounds):
                for step in s.steps(DataLoader(Rows(), 2)):
                    with step as x:
                        net(x).square().mean().backward()
                        optimizer.step()
                        optimizer.zero_grad()
            assert s.step == rounds * STEPS


# ---------------------------------------------------------------------- the comparison


class Places:
    """A feed of numbers."""

    repeatable = True
    rewinds = True
    epoch = 0
    last_in_epoch = False

    def __init__(self, numbers: list[int], local: Any = None) -> None:
        self.numbers, self.at, self._local = numbers, 0, local

    def draw(self, epochs: int | None = None) -> int:
        self.at += 1
        return self.numbers[self.at - 1]

    def place(self) -> dict[str, int]:
        return {"epoch": 0, "batch": self.at}

    def seek(self, place: Any, local: Any = None) -> None:
        self.at = place["batch"]

    def local_state(self) -> Any:
        return self._local

    def identity(self) -> None:
        return None

    def close(self) -> None:
        pass


class Digests:
    copy = Copy(0, 1)

    def digest_batch(self, batch: Any) -> int:
        return digest_of_batch(batch)


def drawn(feed: Places, steps: int) -> Drawn:
    """Return the record of a process that has drawn the batches of ``steps`` steps."""
    proof = Drawn(Digests(), 0, verify=True)
    for step in range(steps):
        before, batch = feed.place(), feed.draw()
        proof.drew(step, [batch], before, feed.place())
    return proof


def load(feed: Any) -> list[Any]:
    return [feed.draw()]


def test_the_batch_before_the_next_one_is_read_and_the_feed_is_behind_it() -> None:
    record = drawn(Places([5, 6, 7]), 2).record
    for numbers, differs in (([5, 6, 8], False), ([5, 9, 7], True)):
        proof, feed = Drawn(Digests(), 0, verify=True), Places(numbers)
        proof.stand_at(record)
        if differs:
            with pytest.raises(DataError):
                proof.reread(2, feed, load)
        else:
            assert proof.reread(2, feed, load) and feed.at == 2


def test_the_batch_in_flight_is_compared_when_it_is_drawn_again() -> None:
    record = drawn(Places([5, 6, 7]), 2).record
    proof, feed = Drawn(Digests(), 0, verify=True), Places([5, 6, 7])
    proof.stand_at(record)
    assert not proof.reread(1, feed, load)  # step 1 comes next: there is no later record
    proof.drew(1, [6], {"epoch": 0, "batch": 1}, {"epoch": 0, "batch": 2})
    proof.stand_at(record)
    with pytest.raises(DataError, match="step 1"):
        proof.drew(1, [7], {"epoch": 0, "batch": 1}, {"epoch": 0, "batch": 2})


def test_the_record_shows_the_position_of_this_rank_in_the_same_loop() -> None:
    feed = Places([5, 6, 7])
    proof = Drawn(Digests(), 0, verify=True)
    proof.begin(None, 3)
    assert proof.position(0, 3) is None
    before, batch = feed.place(), feed.draw()
    proof.drew(8, [batch], before, feed.place())
    assert (proof.position(8, 3), proof.position(9, 3)) == (before, feed.place())
    assert [proof.position(*at) for at in ((10, 3), (7, 3), (9, 4))] == [None] * 3
    proof.forget()
    assert proof.position(9, 3) is None


def test_a_loader_that_alone_knows_its_place_is_not_sent_back() -> None:
    proof = Drawn(Digests(), 0, verify=True)
    proof.stand_at(drawn(Places([5, 6]), 2).record)
    assert not proof.reread(2, Places([5, 6], local={"at": 2}), load)
    unchecked = Drawn(Digests(), 0, verify=False)
    unchecked.stand_at(drawn(Places([5, 6]), 2).record)
    assert not unchecked.reread(2, Places([5, 9]), load)


def test_a_digest_tells_batches_apart() -> None:
    x = torch.arange(2000.0).reshape(40, 50)
    changed = x.clone()
    changed[0, 0] = 9
    base = {"x": x, "y": [1, "a"]}
    others: list[Any] = [
        {"x": changed, "y": [1, "a"]},
        {"x": x.double(), "y": [1, "a"]},
        {"x": x.reshape(50, 40), "y": [1, "a"]},
        {"x": x, "y": [1, "b"]},
        {"x": x, "z": [1, "a"]},
        {"x": x.numpy(), "y": [1, "a"]},
    ]
    assert digest_of_batch(base) == digest_of_batch({"x": x.clone(), "y": (1, "a")})
    assert len({digest_of_batch(each) for each in [base, *others]}) == 1 + len(others)
    rows = [torch.randint(0, 50000, (8, 128), generator=torch.Generator().manual_seed(n)) for n in range(64)]
    assert len({digest_of_batch(row) for row in rows}) == 64


class Padded:
    """A batch in an object, as a collate function makes it (SpeechBrain's ``PaddedBatch``)."""

    def __init__(self, wavs: Any, names: list[str]) -> None:
        self.names, self._made, self._wavs = names, object(), {"wav": [wavs]}
        self.itself = self


def test_a_digest_tells_batches_in_objects_apart() -> None:
    """Regression: all had the digest of their type. Other data was read without a word, and a warning was wrong."""
    made = [Padded(x, ["a"] * 200) for x in (torch.zeros(2, 3), torch.ones(2, 3), torch.ones(2, 3).numpy())]
    assert len({digest_of_batch([each]) for each in made}) == 3 and 0 not in map(digest_of_batch, made)
    assert digest_of_batch(made[0]) == digest_of_batch(Padded(torch.zeros(2, 3), ["b"]))
    assert digest_of_batch([object(), None]) == 0, "the content is not known"


def padded(rows: list[torch.Tensor]) -> Padded:
    """Return the rows as an object: the collate function of a loader."""
    return Padded(torch.stack(rows), [])


def test_other_data_in_objects_is_an_error(tmp_path: Path) -> None:
    def run(changed: int, until: int) -> None:
        net = nn.Linear(4, 1)
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        loader = DataLoader(Rows(changed=changed), 2, collate_fn=padded)
        with holdfast.session(model=net, optimizer=optimizer, checkpoint=tmp_path, verify_block=0) as s:
            for step in s.steps(loader, until=until):
                with step as batch:
                    net(batch._wavs["wav"][0]).square().mean().backward()
                    optimizer.step()
                    optimizer.zero_grad()

    run(-1, 3)
    with pytest.raises(DataError, match="gives another batch for step 2"):
        run(5, 5)


@pytest.mark.parametrize(
    "batch",
    [
        torch.zeros(0, 3),
        torch.tensor(1.0),
        torch.zeros(3, 2).T,
        torch.ones(3, dtype=torch.bfloat16),
        torch.ones(3, dtype=torch.complex64).conj(),
        torch.eye(3).to_sparse(),
        object(),
        None,
        [[], {}],
    ],
)
def test_a_digest_of_odd_batches_is_the_same_again(batch: Any) -> None:
    assert digest_of_batch(batch) == digest_of_batch(batch)
