"""Schedules of learning rates that move an optimizer of the session and that the session does not have."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, ReduceLROnPlateau, SequentialLR, StepLR

from holdfast.frameworks.torch.state.state import TorchState
from holdfast.frameworks.torch.steps.undeclared_schedules import UndeclaredSchedules

pytestmark = pytest.mark.torch


class Loop:
    """A part of a script that holds its schedule and saves it."""

    def __init__(self, schedule: Any) -> None:
        self.schedule = schedule

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the schedule."""
        return {"schedule": self.schedule.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the state of the schedule."""
        self.schedule.load_state_dict(state["schedule"])


def made() -> tuple[nn.Module, SGD]:
    model = nn.Linear(2, 1)
    return model, SGD(model.parameters(), lr=0.1)


def step_of(optimizer: SGD) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.ones_like(parameter)
    optimizer.step()


def test_a_schedule_is_named_from_its_first_move_on() -> None:
    model, optimizer = made()
    schedule = StepLR(optimizer, 3)
    found = UndeclaredSchedules(TorchState(model, {"default": optimizer}))
    found.search()
    assert found.moved() == []
    step_of(optimizer)
    schedule.step()  # the rate stays: it changes at the third one
    assert optimizer.param_groups[0]["lr"] == 0.1
    assert found.moved() == ["the StepLR of optimizer 'default'"]
    found.search()
    assert found.moved() == ["the StepLR of optimizer 'default'"]


def test_a_schedule_that_a_metric_moves_is_named() -> None:
    model, optimizer = made()
    schedule = ReduceLROnPlateau(optimizer)
    found = UndeclaredSchedules(TorchState(model, {"default": optimizer}))
    found.search()
    schedule.step(1.0)
    assert found.moved() == ["the ReduceLROnPlateau of optimizer 'default'"]


def test_schedules_of_the_session_and_of_other_optimizers_are_not_named() -> None:
    model, optimizer = made()
    _, other = made()
    outside, kept = StepLR(other, 3), StepLR(optimizer, 3)
    parts: list[LRScheduler] = [LambdaLR(optimizer, lambda n: 1.0), LambdaLR(optimizer, lambda n: 0.5)]
    whole = SequentialLR(optimizer, parts, milestones=[2])
    extras = {"loop": Loop(kept), "more": {"schedule": [StepLR(optimizer, 5)]}}
    state = TorchState(model, {"default": optimizer}, schedulers=whole)
    state.extras = extras
    found = UndeclaredSchedules(state)
    found.search()
    step_of(optimizer)
    step_of(other)
    for schedule in (outside, kept, whole, *extras["more"]["schedule"]):  # type: ignore[index]
        schedule.step()
    assert found.moved() == []


def test_a_schedule_that_has_gone_is_not_named() -> None:
    model, optimizer = made()
    found = UndeclaredSchedules(TorchState(model, {"default": optimizer}))
    schedule = StepLR(optimizer, 3)
    found.search()
    step_of(optimizer)
    schedule.step()
    del schedule
    assert found.moved() == []
