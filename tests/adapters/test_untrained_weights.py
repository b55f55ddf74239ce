"""The copies of weights that no optimizer trains, and which weights these are."""

from __future__ import annotations

import copy
import logging

import pytest
import torch
from torch import nn

import holdfast
from holdfast.errors import ImpureBlockError
from holdfast.frameworks.torch.state.optimizer_state import trained_by

pytestmark = pytest.mark.torch

WIDE = 80  # a weight of this width is too large to be copied as a small tensor


def test_members_of_an_optimizer_without_any_gradient_are_trained() -> None:
    """A momentum encoder may be a member beside the trained network; a network of a GAN is off until its phase."""
    query, key, off = (
        nn.Linear(2, 2),
        nn.Linear(2, 2).requires_grad_(False),
        nn.Linear(2, 2).requires_grad_(False),
    )
    both = torch.optim.SGD([*query.parameters(), *key.parameters()], 0.1)
    assert trained_by([both]) == {id(p) for p in query.parameters()}
    assert trained_by([torch.optim.SGD(off.parameters(), 0.1)]) == {id(p) for p in off.parameters()}


def test_an_average_of_a_network_whose_gradients_are_off_between_its_phases_is_put_back(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Regression: the average was not copied, the check of the block found it changed, and the session refused it."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(WIDE, WIDE), nn.Linear(WIDE, 1)).requires_grad_(False)
    average = copy.deepcopy(net)
    optimizer = torch.optim.Adam(net.parameters(), 0.01)
    with (
        caplog.at_level(logging.WARNING),
        holdfast.session(model=net, optimizer=optimizer, state={"average": average}, resume="never") as s,
    ):
        for step in s.steps(until=3):
            with step:
                optimizer.zero_grad()
                net.requires_grad_(True)
                net(torch.randn(4, WIDE)).sum().backward()
                net.requires_grad_(False)
                with step.update("net"):
                    optimizer.step()
                for mean, weight in zip(average.parameters(), net.parameters(), strict=True):
                    mean.lerp_(weight, 0.5)
    assert not [text for text in caplog.messages if "changed before the vote" in text]


@pytest.mark.parametrize("replaced", [True, False], ids=["replaced", "in place"])
def test_averages_of_weights_that_are_not_trained_are_put_back(
    caplog: pytest.LogCaptureFixture, replaced: bool
) -> None:
    """Regression: no trained weight had the shape, so each run of the check moved the average (MoCo's first layer)."""
    torch.manual_seed(0)
    fixed, moving = (nn.Linear(WIDE, WIDE).requires_grad_(False) for _ in range(2))
    expected = moving.weight.detach().clone()
    net = nn.Sequential(fixed, nn.Linear(WIDE, WIDE + 1))
    average = nn.Sequential(moving, nn.Linear(WIDE, WIDE + 1)).requires_grad_(False)
    both = nn.ModuleDict({"net": net, "average": average})
    optimizer = torch.optim.SGD([p for p in net.parameters() if p.requires_grad], 0.01)
    with (
        caplog.at_level(logging.WARNING),
        holdfast.session(model=both, optimizer=optimizer, resume="never") as s,
    ):
        for step in s.steps(until=3):
            with step:
                for mean, weight in zip(average.parameters(), net.parameters(), strict=True):
                    if replaced:
                        mean.data = mean.data * 0.5 + weight.data * 0.5
                    else:
                        mean.data.mul_(0.5).add_(weight.data, alpha=0.5)
                x = torch.randn(4, WIDE)
                optimizer.zero_grad()
                (net(x) - average(x)).square().sum().backward()
                optimizer.step()
    for _ in range(3):
        expected = expected * 0.5 + fixed.weight * 0.5
    assert torch.equal(moving.weight, expected)
    assert not [text for text in caplog.messages if "changed before the vote" in text]


def test_an_average_that_is_too_large_to_be_copied_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    """Regression: each run of the check moved it, and nothing but a warning said so."""
    net = nn.Linear(4, 1)
    average = nn.Linear(WIDE, WIDE).requires_grad_(False)
    optimizer = torch.optim.SGD(net.parameters(), 0.01)
    both = nn.ModuleDict({"net": net, "average": average})
    with (
        pytest.raises(ImpureBlockError, match=r"the weight average.weight \(no copy\) changed"),
        caplog.at_level(logging.WARNING),
        holdfast.session(model=both, optimizer=optimizer, resume="never") as s,
    ):
        for step in s.steps(until=3):
            with step:
                average.weight.data = average.weight.data * 0.5
                optimizer.zero_grad()
                net(torch.randn(4, 4)).sum().backward()
                optimizer.step()
    assert any("average.weight was changed before the vote" in text for text in caplog.messages)
