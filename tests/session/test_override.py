"""A hyperparameter whose value in the script differs from that in the checkpoint: reported, or used if requested."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import holdfast
from holdfast.errors import CheckpointMismatch, UsageError

pytestmark = pytest.mark.torch

UNTIL = 6


def warm(optimizer: torch.optim.Optimizer, **arguments: Any) -> Any:
    """Return a schedule that has moved the learning rate by the time of the checkpoint."""
    return torch.optim.lr_scheduler.StepLR(optimizer, **{"step_size": 2, "gamma": 0.5, **arguments})


def train(
    root: Path, until: int, *, override: list[str] | None = None, scheduler: Any = warm, **arguments: Any
) -> tuple[torch.optim.Optimizer, Any, torch.Tensor]:
    """Train in one process until step ``until``. ``arguments`` go to the optimizer."""
    torch.manual_seed(3)
    net = nn.Linear(4, 1)
    groups: list[dict[str, Any]] = [{"params": [net.weight]}, {"params": [net.bias], "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, **{"lr": 0.1, "weight_decay": 0.01, **arguments})
    schedule = scheduler(optimizer)
    x = torch.randn(24, 4, generator=torch.Generator().manual_seed(1))
    with holdfast.session(
        model=net, optimizer=optimizer, scheduler=schedule, checkpoint=root, override=override or []
    ) as s:
        for step in s.steps(DataLoader(TensorDataset(x), 4), until=until):
            with step as (batch,):
                net(batch).square().mean().backward()
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
    return optimizer, schedule, torch.cat([net.weight.detach().flatten(), net.bias.detach()])


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return the log lines on differing values since the last call."""
    lines = [record.getMessage() for record in caplog.records if "in this script" in record.getMessage()]
    caplog.clear()
    return lines


def test_the_same_script_is_told_nothing_and_ends_the_same(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    train(tmp_path / "a", UNTIL)
    train(tmp_path / "b", 3)
    assert torch.equal(train(tmp_path / "a", UNTIL)[2], train(tmp_path / "b", UNTIL)[2])
    assert told(caplog) == []


def test_a_value_that_the_script_has_changed_is_told_and_the_checkpoint_s_is_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "holdfast")
    train(tmp_path, 3)
    changed: dict[str, Any] = {"lr": 0.02, "weight_decay": 0.3, "betas": (0.8, 0.9)}
    for until in (4, 5):  # each start reports it
        optimizer, _, _ = train(tmp_path, until, **changed)
        lines = told(caplog)
        assert [line.split(": ")[0] for line in lines] == [
            "lr of optimizer 'default'",
            "betas of optimizer 'default'",
            "weight_decay of optimizer 'default'",
        ], lines
        assert "0.1 in the checkpoint, 0.02 in this script: the checkpoint's is used" in lines[0]
        assert "session(override=['lr']) takes the script's" in lines[0]
    assert [group["initial_lr"] for group in optimizer.param_groups] == [0.1, 0.1]
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.01, 0.0]


def test_an_overridden_value_is_the_script_s_once_and_a_moved_rate_stays_moved(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "holdfast")
    train(tmp_path, 3)  # the schedule has halved the rate once
    changed: dict[str, Any] = {"lr": 0.02, "betas": (0.8, 0.9), "override": ["lr", "betas"]}
    for until in (4, 5):
        optimizer, schedule, _ = train(tmp_path, until, **changed)
        assert len(told(caplog)) == (2 if until == 4 else 0)
        halved = 0.5 ** (until // 2)
        assert [group["lr"] for group in optimizer.param_groups] == [0.02 * halved] * 2
        assert {group["betas"] for group in optimizer.param_groups} == {(0.8, 0.9)}
        assert schedule.base_lrs == [0.02, 0.02]


def test_a_changed_schedule_is_told_and_another_kind_is_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    train(tmp_path, 3)
    _, schedule, _ = train(tmp_path, 4, scheduler=lambda o: warm(o, gamma=0.9))
    assert [line.split(": ")[0] for line in told(caplog)] == ["gamma of scheduler 'default'"]
    assert schedule.gamma == 0.5
    _, schedule, _ = train(tmp_path, 5, scheduler=lambda o: warm(o, gamma=0.9), override=["gamma"])
    assert schedule.gamma == 0.9
    with pytest.raises(CheckpointMismatch, match="class of scheduler 'default': StepLR in the checkpoint"):
        train(tmp_path, 6, scheduler=lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 20))


def test_a_value_that_no_optimizer_has_is_refused_with_what_is_meant(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"override=\['weigth_decay'\]") as caught:
        train(tmp_path, 1, override=["weigth_decay"])
    assert "did you mean 'weight_decay'?" in caught.value.hint


def falling(number: int, start: int = 0) -> float:
    """Return the factor of a rate after ``start`` steps and a number of further ones."""
    return float(0.9 ** (number + start))


def by(function: Callable[[int], float]) -> Callable[[torch.optim.Optimizer], Any]:
    """Return a maker of schedules that compute the rate with a function."""
    return lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, function)


class Counted:
    """A function that counts its calls."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, number: int) -> float:
        self.calls += 1
        return falling(self.calls)


@pytest.mark.parametrize(
    ("first", "second", "rates"),
    [
        (falling, falling, None),
        (falling, partial(falling, start=0), None),
        (falling, partial(falling, start=3), "0.0531441 at step 3, where the checkpoint has 0.0729"),
        (falling, lambda number: falling(number, 3), "0.0531441 at step 3, where the checkpoint has 0.0729"),
        (falling, lambda number: {0: 1.0, 4: 0.5, 5: 0.4, 6: 0.3}[number], None),  # raises at step 3
    ],
)
def test_another_function_of_a_schedule_is_reported_with_its_rate(
    first: Callable[[int], float],
    second: Callable[[int], float],
    rates: str | None,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    train(tmp_path, 3, scheduler=by(first))
    caplog.clear()
    train(tmp_path, UNTIL, scheduler=by(second))
    lines = [each.getMessage() for each in caplog.records if "function of scheduler" in each.getMessage()]
    assert [str(rates) in line for line in lines] == [True] * (rates is not None)


def test_a_function_that_counts_its_calls_is_not_called_by_a_load(tmp_path: Path) -> None:
    _, _, undisturbed = train(tmp_path / "a", UNTIL, scheduler=lambda o: by(Counted())(o))
    train(tmp_path / "b", 3, scheduler=lambda o: by(Counted())(o))
    _, _, resumed = train(tmp_path / "b", UNTIL, scheduler=lambda o: by(Counted())(o))
    assert torch.equal(undisturbed, resumed)
