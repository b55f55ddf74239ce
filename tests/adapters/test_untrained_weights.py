"""The copies of weights that no optimizer trains, and which weights these are."""

from __future__ import annotations

import copy
import logging

import pytest
import torch
from torch import nn

import holdfast
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
