"""Gradients that remain from one step and are refused in the next."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

import holdfast
from holdfast.errors import StepError

pytestmark = pytest.mark.torch


def train_in_steps(block: Any) -> None:
    """Train a generator and a discriminator, in blocks with named updates."""
    torch.manual_seed(0)
    g, d = nn.Linear(2, 2), nn.Linear(2, 1)
    of_g, of_d = torch.optim.SGD(g.parameters(), 0.1), torch.optim.SGD(d.parameters(), 0.1)
    with holdfast.session(
        model={"g": g, "d": d}, optimizer={"g": of_g, "d": of_d}, resume="never", verify_block=0
    ) as s:
        for step in s.steps(until=3):
            with step:
                block(step, g, d, of_g, of_d)


def train(block: Any, steps: int = 3, **given: Any) -> None:
    """Train a generator and a discriminator, each with its own optimizer."""
    torch.manual_seed(0)
    g, d = nn.Linear(2, 2), nn.Linear(2, 1)
    of_g, of_d = torch.optim.SGD(g.parameters(), 0.1), torch.optim.SGD(d.parameters(), 0.1)
    with holdfast.session(
        model={"g": g, "d": d}, optimizer={"g": of_g, "d": of_d}, resume="never", **given
    ) as s:
        for step in s.steps(until=steps):
            with step:
                block(g, d, of_g, of_d)


@pytest.mark.parametrize("to_none", [True, False])
def test_each_may_be_cleared_before_its_own_backward(to_none: bool) -> None:
    """GANs train the discriminator first, while the gradients of the generator from the step before still exist."""

    def block(g: nn.Module, d: nn.Module, of_g: Any, of_d: Any) -> None:
        fake = g(torch.ones(4, 2))
        of_d.zero_grad(set_to_none=to_none)
        d(fake.detach()).sum().backward()
        of_d.step()
        of_g.zero_grad(set_to_none=to_none)
        d(fake).sum().backward()
        of_g.step()

    train(block)


@pytest.mark.parametrize("toggled", [False, True])
def test_a_network_may_be_cleared_after_the_backward_pass_of_another_went_through_it(toggled: bool) -> None:
    """GANs that train the generator first: its backward pass goes through the discriminator. Regression: refused."""

    def block(step: Any, g: nn.Module, d: nn.Module, of_g: Any, of_d: Any) -> None:
        fake = g(torch.ones(4, 2))
        of_g.zero_grad()
        if toggled:
            d.requires_grad_(False)
        d(fake).sum().backward()
        d.requires_grad_(True)
        with step.update("g"):
            of_g.step()
        of_d.zero_grad()
        d(fake.detach()).sum().backward()
        with step.update("d"):
            of_d.step()

    train_in_steps(block)


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("adds", [False, True])
def test_a_network_may_keep_its_gradients_in_a_block_that_does_not_train_it(named: bool, adds: bool) -> None:
    """EnCodec trains its discriminator in some steps, and clears it just before. Regression: refused."""

    def block(step: Any, g: nn.Module, d: nn.Module, of_g: Any, of_d: Any) -> None:
        fake = g(torch.ones(4, 2))
        if step.number % 2 == 0:
            of_d.zero_grad()
            d(fake.detach()).sum().backward()
            with step.update("d"):
                of_d.step()
        of_g.zero_grad()
        d.requires_grad_(adds)
        loss = d(fake).sum()
        d.requires_grad_(True)
        loss.backward()
        with step.update("g") if named else nullcontext():
            of_g.step()

    if adds:
        with pytest.raises(StepError, match="step 0 leaves the gradients of its update"):
            train_in_steps(block)
    else:
        train_in_steps(block)


def test_a_network_that_steps_with_the_gradients_of_an_earlier_block_is_refused() -> None:
    def block(step: Any, g: nn.Module, d: nn.Module, of_g: Any, of_d: Any) -> None:
        of_g.zero_grad()
        if step.number == 0:
            d(g(torch.ones(4, 2)).detach()).sum().backward()
        d.requires_grad_(False)
        loss = d(g(torch.ones(4, 2))).sum()
        d.requires_grad_(True)
        loss.backward()
        of_g.step()
        of_d.step()

    with pytest.raises(StepError, match="step 0 leaves the gradients of its update"):
        train_in_steps(block)


def test_a_network_may_be_cleared_later_after_a_step_that_its_scaler_left_out() -> None:
    """Regression: a step whose updates the scalers skip counted as one that adds up gradients."""
    scalers = {name: torch.amp.GradScaler("cpu", init_scale=2.0**127) for name in ("g", "d")}
    torch.manual_seed(0)
    g, d = nn.Linear(2, 2), nn.Linear(2, 1)
    of_g, of_d = torch.optim.SGD(g.parameters(), 0.1), torch.optim.SGD(d.parameters(), 0.1)
    with holdfast.session(
        model={"g": g, "d": d}, optimizer={"g": of_g, "d": of_d}, state=dict(scalers), resume="never"
    ) as s:
        for step in s.steps(until=8):
            with step:
                fake = g(torch.ones(4, 2))
                for name, optimizer, loss in (("g", of_g, d(fake)), ("d", of_d, -d(fake.detach()))):
                    optimizer.zero_grad()
                    scalers[name].scale(4 * loss.sum()).backward()
                    scalers[name].unscale_(optimizer)
                    with step.update(name):
                        scalers[name].step(optimizer)
                    scalers[name].update()
    assert all(scaler.get_scale() < 2.0**127 for scaler in scalers.values())


def test_a_network_that_is_not_cleared_is_refused_at_its_named_update() -> None:
    updates: list[str] = []

    def block(step: Any, g: nn.Module, d: nn.Module, of_g: Any, of_d: Any) -> None:
        updates.clear()
        fake = g(torch.ones(4, 2))
        of_g.zero_grad()
        d(fake).sum().backward()
        with step.update("g"):
            of_g.step()
        updates.append("g")
        d(fake.detach()).sum().backward()
        with step.update("d"):
            of_d.step()
        updates.append("d")

    with pytest.raises(StepError, match="step 0 leaves the gradients of its update"):
        train_in_steps(block)
    assert updates == ["g"]


@pytest.mark.parametrize("way", ["at the start", "at the end", "by hand"])
def test_gradients_that_are_zeroed_in_place_are_fine(way: str) -> None:
    def block(g: nn.Module, d: nn.Module, of_g: Any, of_d: Any) -> None:
        def clear() -> None:
            for optimizer in (of_g, of_d):
                optimizer.zero_grad(set_to_none=False)

        if way == "at the start":
            clear()
        if way == "by hand":
            for parameter in (*g.parameters(), *d.parameters()):
                if parameter.grad is not None:
                    parameter.grad.zero_()
        d(g(torch.ones(4, 2))).sum().backward()
        of_d.step()
        of_g.step()
        if way == "at the end":
            clear()

    train(block)


def test_gradients_of_one_optimizer_that_nobody_clears_are_refused_before_the_second_update() -> None:
    weights: list[torch.Tensor] = []

    def block(g: nn.Module, d: nn.Module, of_g: Any, of_d: Any) -> None:
        of_d.zero_grad()
        weights[:] = [p.detach().clone() for p in g.parameters()]
        d(g(torch.ones(4, 2))).sum().backward()
        of_d.step()
        of_g.step()
        weights.clear()

    with pytest.raises(StepError, match="step 0 leaves the gradients of its update") as refused:
        train(block)
    assert "zero_grad()" in refused.value.hint and weights  # the second block did not reach its update


def test_frozen_modules_may_keep_theirs() -> None:
    def block(g: nn.Module, d: nn.Module, of_g: Any, of_d: Any) -> None:
        of_g.zero_grad()
        d(g(torch.ones(4, 2))).sum().backward()
        of_g.step()

    torch.manual_seed(0)
    g, d = nn.Linear(2, 2), nn.Linear(2, 1)
    of_g = torch.optim.SGD(g.parameters(), 0.1)
    with holdfast.session(model={"g": g, "d": d}, optimizer=of_g, resume="never") as s:
        for step in s.steps(until=3):
            with step:
                block(g, d, of_g, None)
