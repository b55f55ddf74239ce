"""An optimizer whose ``step()`` calls the one of its base class: torch calls the hooks at both."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import holdfast

pytestmark = pytest.mark.torch


class Derived(torch.optim.SGD):
    """An optimizer that leaves the update to its base class, and may fail at first."""

    fails = False

    def step(self, closure: Any = None) -> Any:
        """Make an update."""
        loss = super().step(closure)
        if self.fails:
            self.fails = False
            raise ValueError("after the update")
        return loss


def train(*, named: bool, again: bool = False) -> torch.Tensor:
    """Train in one process for four steps, with a named update or without; return the weights.

    Args:
        again: the first ``step()`` of each block raises, and the script calls it again.
    """
    torch.manual_seed(3)
    torch.optim.SGD(
        [nn.Parameter(torch.zeros(1))], lr=0.1
    )  # from now on torch calls the hooks of the base class
    net = nn.Linear(4, 1)
    optimizer = Derived(net.parameters(), lr=0.1)
    x = torch.randn(16, 4, generator=torch.Generator().manual_seed(1))
    with holdfast.session(model=net, optimizer=optimizer) as s:
        for step in s.steps(DataLoader(TensorDataset(x), 4), epochs=1):
            with step as (batch,):
                net(batch).square().mean().backward()
                optimizer.fails = again
                with step.update("net") if named else nullcontext():
                    if again:
                        with pytest.raises(ValueError):
                            optimizer.step()
                    optimizer.step()
                optimizer.zero_grad()
        assert s.step == 4
    return net.weight.detach()


def test_both_steps_are_one_update() -> None:
    assert torch.equal(train(named=True), train(named=False))


@pytest.mark.parametrize("named", [True, False])
def test_a_step_after_one_that_failed_is_another_update(named: bool) -> None:
    with pytest.raises(holdfast.errors.StepError, match="'default' steps twice"):
        train(named=named, again=True)
