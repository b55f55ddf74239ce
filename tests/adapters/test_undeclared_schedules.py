"""Schedules of learning rates that move an optimizer of the session and that the session does not have."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, ReduceLROnPlateau, SequentialLR, StepLR

from holdfast.frameworks.torch.state.state import TorchState
from holdfast.frameworks.torch.steps import undeclared_schedules
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


class Wrapper:
    """A wrapper of a library around an optimizer, with its state."""

    def __init__(self, optimizer: SGD) -> None:
        self.optimizer = optimizer

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the optimizer."""
        return self.optimizer.state_dict()


LIBRARY = """
class _ParamScheduler:
    def __init__(self, optimizer):
        self.optimizer, self.last_step = optimizer, 0

    def step(self):
        self.last_step += 1

    def state_dict(self):
        return {key: value for key, value in self.__dict__.items() if key != "optimizer"}

    def load_state_dict(self, state):
        self.__dict__.update(state)


class RateMixin:
    pass


class LinearLR(RateMixin, _ParamScheduler):
    pass


class Flags:
    __class__ = property(lambda self: type)

    def __getattr__(self, name):
        raise RuntimeError("unknown flag: " + name)


FLAGS = Flags()
"""


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return the module of a library with a schedule that is not derived from torch's (mmengine)."""
    (tmp_path / "library_of_schedules.py").write_text(LIBRARY)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(undeclared_schedules, "LIBRARIES", (str(tmp_path),))
    yield importlib.import_module("library_of_schedules")
    sys.modules.pop("library_of_schedules")


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


@pytest.mark.parametrize("held", ["optimizer", "wrapper", "groups"])
def test_a_schedule_of_a_library_is_named_from_its_first_move_on(library: Any, held: str) -> None:
    model, optimizer = made()
    _, other = made()
    holds = {"optimizer": optimizer, "wrapper": Wrapper(optimizer), "groups": optimizer.param_groups}[held]
    schedule, kept, outside = library.LinearLR(holds), library.LinearLR(holds), library.LinearLR(other)
    found = UndeclaredSchedules(TorchState(model, {"default": optimizer}, schedulers=[kept]))
    found.search()
    kept.step()
    outside.step()
    assert found.moved() == []
    schedule.step()
    assert found.moved() == ["the LinearLR of optimizer 'default'"]


def test_a_schedule_of_a_library_that_follows_the_number_of_the_step_is_not_named(library: Any) -> None:
    model, optimizer = made()
    schedule = library.LinearLR(optimizer)
    found = UndeclaredSchedules(TorchState(model, {"default": optimizer}))
    found.search()
    schedule.optimizer.param_groups[0]["lr"] = 0.05
    assert found.moved() == []


def test_a_wrapper_of_a_library_around_a_schedule_of_the_session_is_not_named(library: Any) -> None:
    model, optimizer = made()
    kept = StepLR(optimizer, 3)
    wrapper = library.LinearLR(None)  # accelerate's AcceleratedScheduler
    wrapper.scheduler, wrapper.optimizers = kept, [optimizer]
    found = UndeclaredSchedules(TorchState(model, {"default": optimizer}, schedulers=kept))
    found.search()
    wrapper.step()
    assert found.moved() == []


def test_a_proxy_of_a_library_that_says_it_is_a_class_is_not_asked(library: Any) -> None:
    """Regression: the flags of TensorBoard parsed the arguments of the script, and ended it at step 0."""
    assert isinstance(library.FLAGS, type)
    model, optimizer = made()
    UndeclaredSchedules(TorchState(model, {"default": optimizer})).search()
