"""Gradient accumulation: a step uses several batches of the loader."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import holdfast
from holdfast.errors import DataError, StepError, UsageError
from holdfast.frameworks.torch.steps.accelerate_accumulation import MODULE, Accumulating
from holdfast.session.session import PARTS_VARIABLE

pytestmark = pytest.mark.torch


class Script:
    """A training with seven batches in an epoch."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.net = nn.Linear(4, 1)
        self.optimizer = torch.optim.Adam(self.net.parameters(), 0.1)
        self.loader = DataLoader(TensorDataset(torch.arange(28.0).reshape(7, 4)), 1)

    def session(self, root: Path | None, **arguments: Any) -> Any:
        """Return a session of this script."""
        return holdfast.session(model=self.net, optimizer=self.optimizer, checkpoint=root, **arguments)

    def train(self, root: Path, until: int) -> list[list[int]]:
        """Train. Return the first number of each batch, for each step that counts."""
        seen = []
        with self.session(root) as s:
            for step in s.steps(self.loader, until=until, batches=3):
                with step as batches:
                    for (x,) in batches:
                        (self.net(x).square().mean() / len(batches)).backward()
                    batches.pop()  # the next run of the block gets it again
                    self.optimizer.step()
                    self.optimizer.zero_grad()
                if step.committed:
                    seen.append([int(x[0, 0]) // 4 for (x,) in step.batch] + [step.epoch, step.last_in_epoch])
        return seen


def length(loader: Any, **arguments: int) -> int:
    """Return the length of a loop over steps, as ``log_every`` or ``tqdm`` around the steps requests it."""
    with Script().session(None) as s:
        return len(s.steps(loader, **arguments))


def test_the_steps_have_the_length_of_their_whole_loop() -> None:
    loader = Script().loader
    assert [length(loader, batches=batches) for batches in (1, 3, 7, 8)] == [7, 3, 1, 1]
    assert (length(loader), length(loader, batches=3, epochs=2)) == (7, 6)
    with pytest.raises(TypeError, match=r"s\.steps\(until=N\) has no len\(\)"):
        length(loader, until=9)
    with pytest.raises(TypeError, match="'Refilling' has no len"):
        length(Refilling(3))


def test_the_length_of_a_loop_is_the_same_after_a_restart(tmp_path: Path) -> None:
    found = []
    for taken in (2, 5):
        script = Script()
        with script.session(tmp_path) as s:
            steps = s.steps(script.loader, epochs=1)
            for step in steps:
                with step as (x,):
                    script.net(x).square().mean().backward()
                    script.optimizer.step()
                    script.optimizer.zero_grad()
                if step.committed:
                    found.append((step.number, len(steps)))
                if step.number + 1 == taken:
                    break
    assert found == [(number, 7) for number in range(5)]


class Refilling:
    """A loader that fills one of its tensors with each batch, one after the other."""

    def __init__(self, tensors: int) -> None:
        self.tensors = [torch.empty(1, 4) for _ in range(tensors)]

    def __iter__(self) -> Iterator[tuple[torch.Tensor]]:
        for number in range(8):
            yield (self.tensors[number % len(self.tensors)].fill_(number),)


def parts_of(loader: Refilling, batches: int | None) -> list[Any]:
    """Train for two steps. Return the number in each batch of each block."""
    script, seen = Script(), []
    with holdfast.session(model=script.net, optimizer=script.optimizer, verify_block=0) as s:
        for step in s.steps(loader, until=2, batches=batches):
            with step as batch:
                drawn = [batch] if batches is None else batch
                for (x,) in drawn:
                    (script.net(x).square().mean() / len(drawn)).backward()
                numbers = [int(x[0, 0]) for (x,) in drawn]
                seen.append(numbers[0] if batches is None else numbers)
                script.optimizer.step()
                script.optimizer.zero_grad()
    return seen


@pytest.mark.parametrize("tensors", [1, 2, 3])
def test_a_loader_that_fills_the_same_tensors_again_is_refused(tensors: int) -> None:
    """Regression: a step of several batches used the last one several times, without a word."""
    script = Script()
    refused = pytest.raises(
        DataError, match="the loader writes each batch into the tensors of a batch before"
    )
    script.loader = Refilling(tensors)  # type: ignore[assignment]
    with nullcontext() if tensors == 3 else refused:
        assert script.train(None, 2)  # type: ignore[arg-type]


@pytest.mark.parametrize("tensors", [1, 3, 4])
def test_such_a_loader_is_refused_where_one_rank_does_the_work_of_two(
    tensors: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: after a shrink, each block of a step used the last batch of the step, without a word."""
    monkeypatch.setenv(PARTS_VARIABLE, "2")
    seen = []
    with nullcontext() if tensors > 2 else pytest.raises(DataError, match="the tensors of a batch before"):
        seen = parts_of(Refilling(tensors), None)
    assert seen == ([0, 1, 2, 3] if tensors > 2 else [])
    with nullcontext() if tensors > 3 else pytest.raises(DataError, match="the tensors of a batch before"):
        assert parts_of(Refilling(tensors), 2) == [[0, 1], [2, 3], [4, 5], [6, 7]]


def test_a_step_has_several_batches_and_an_epoch_ends_with_fewer(tmp_path: Path) -> None:
    whole = Script()
    seen = whole.train(tmp_path / "whole", 5)
    assert seen == [[0, 1, 0, False], [3, 4, 0, False], [0, True], [0, 1, 1, False], [3, 4, 1, False]]
    Script().train(tmp_path / "halves", 2)
    again = Script()
    assert again.train(tmp_path / "halves", 5) == seen[2:]
    assert torch.equal(whole.net.weight, again.net.weight)


@pytest.mark.parametrize("batches", [0, True, "4"])
def test_a_number_of_batches_that_is_none_is_refused(tmp_path: Path, batches: Any) -> None:
    script = Script()
    with script.session(tmp_path) as s, pytest.raises(UsageError, match="not a number of batches"):
        s.steps(script.loader, batches=batches)
    with script.session(tmp_path) as s, pytest.raises(UsageError, match="no loader gives them"):
        s.steps(until=1, batches=2)


def test_one_batch_for_each_turn_of_an_accumulating_loop_is_refused_with_the_way(tmp_path: Path) -> None:
    script = Script()
    with pytest.raises(StepError, match="made no update but leaves gradients") as raised:
        with script.session(tmp_path, verify_block=0) as s:
            for step in s.steps(script.loader):
                with step as (x,):
                    script.net(x).mean().backward()
                    if (step.number + 1) % 3 == 0:
                        script.optimizer.step()
                        script.optimizer.zero_grad()
    assert "s.steps(loader, batches=4)" in str(raised.value.hint)


def test_the_optimizer_inside_fabrics_wrapper_is_the_one(tmp_path: Path) -> None:
    class _FabricOptimizer:
        """An optimizer as Fabric makes it: it has the class of the optimizer that it wraps."""

        def __init__(self, optimizer: Any) -> None:
            self._optimizer = optimizer
            self.__class__ = type("FabricAdam", (self.__class__, type(optimizer)), {})

        @property
        def optimizer(self) -> Any:
            """The wrapped optimizer."""
            return self._optimizer

        def step(self) -> None:
            """Run the wrapped update."""
            self._optimizer.step()

        def zero_grad(self) -> None:
            """Clear the wrapped gradients."""
            self._optimizer.zero_grad()

        def __getattr__(self, name: str) -> Any:
            return getattr(self._optimizer, name)

    plain, wrapped = Script(), Script()
    wrapped.optimizer = _FabricOptimizer(wrapped.optimizer)  # type: ignore[assignment]
    plain.train(tmp_path / "plain", 2)
    wrapped.train(tmp_path / "wrapped", 2)
    assert torch.equal(plain.net.weight, wrapped.net.weight)


def test_the_count_of_accelerate_begins_with_each_block(monkeypatch: pytest.MonkeyPatch) -> None:
    syncs: list[bool] = []
    state = SimpleNamespace(num_steps=4, _set_sync_gradients=syncs.append)

    class Accelerator:
        """The used part of accelerate's Accelerator."""

        gradient_state, step = state, 0

        def _do_sync(self) -> None:
            syncs.append(self.step == -1)

    monkeypatch.setitem(sys.modules, MODULE, SimpleNamespace(Accelerator=Accelerator))
    accelerator, counts = Accelerator(), Accumulating()
    for batches in (4, 2):
        counts.expect(batches)
        counts.begin()
        accelerator._do_sync()  # a block that is broken off
        counts.end()
        counts.begin()
        for _ in range(batches):
            accelerator._do_sync()
        counts.end()
    assert syncs == [False, *[False] * 3, True, False, False, True]
    counts.close()
    accelerator.step = -1
    accelerator._do_sync()
    assert syncs[-1]
