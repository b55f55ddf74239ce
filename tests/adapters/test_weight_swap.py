"""A sample of the weights shows whether other weights are in their place, however those were written."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

from holdfast.frameworks.torch.state.weight_swap import TENSORS_MAX, WeightSample

pytestmark = pytest.mark.torch

Put = Callable[[nn.Module, nn.Module], None]


def past_the_count(net: nn.Module, other: nn.Module) -> None:
    """Copy weights through ``.data``, past torch's version counter, as most libraries of weight averages do."""
    for mine, theirs in zip(net.parameters(), other.parameters(), strict=True):
        mine.data.copy_(theirs)


def by_pointer(net: nn.Module, other: nn.Module) -> None:
    """Exchange the memory of the weights without a copy."""
    for mine, theirs in zip(net.parameters(), other.parameters(), strict=True):
        mine.data = theirs.data


def by_state(net: nn.Module, other: nn.Module) -> None:
    """Copy weights with ``load_state_dict``."""
    net.load_state_dict(other.state_dict())


@pytest.mark.parametrize("put", [past_the_count, by_pointer, by_state])
@pytest.mark.parametrize("layers", [1, 2 * TENSORS_MAX])
def test_other_weights_are_seen_until_they_are_gone(put: Put, layers: int) -> None:
    net = nn.Sequential(*(nn.Linear(3, 3) for _ in range(layers)))
    kept, average = copy.deepcopy(net), copy.deepcopy(net)
    for parameter in average.parameters():
        parameter.data.mul_(0.9)
    places = [parameter.data for parameter in net.parameters()]
    sample = WeightSample(net.parameters())
    sample.note()
    assert sample.is_there()
    put(net, average)
    assert not sample.is_there()
    if put is by_pointer:
        for parameter, place in zip(net.parameters(), places, strict=True):
            parameter.data = place
    else:
        put(net, kept)
    assert sample.is_there()
    put(net, average)
    sample.note()
    assert sample.is_there()


@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.int64, torch.bfloat16, torch.float8_e4m3fn, torch.float64, torch.complex64]
)
def test_of_every_kind_of_tensor(dtype: torch.dtype) -> None:
    whole = torch.zeros(4, 6).to(dtype)
    kinds = [torch.zeros(()).to(dtype), torch.zeros(0, dtype=dtype), whole.t()[1:4], torch.zeros(1).to(dtype)]
    sample = WeightSample(kinds)
    sample.note()
    assert sample.is_there()
    whole[3, 3] = 1  # the last element of the view
    assert not sample.is_there()


def test_weights_that_were_moved_are_the_same_and_without_memory_they_are_not_there() -> None:
    net = nn.Linear(3, 3)
    sample = WeightSample(net.parameters())
    sample.note()
    kept = [parameter.data for parameter in net.parameters()]
    for parameter in net.parameters():
        parameter.data = parameter.data.clone()
    assert sample.is_there()
    net.weight.data = torch.empty(0)
    assert not sample.is_there()
    for parameter, weights in zip(net.parameters(), kept, strict=True):
        parameter.data = weights
    assert sample.is_there()
    net.weight.data = torch.empty(0)
    sample.note()
    assert sample.is_there()


def test_bits_are_compared_and_not_numbers() -> None:
    weights = torch.full((2,), float("nan"))
    sample = WeightSample([weights, torch.zeros(2, dtype=torch.complex64).conj()])
    sample.note()
    assert sample.is_there()


@pytest.mark.parametrize("held", [[], [torch.zeros(0)]])
def test_a_rank_without_weights_has_them_all(held: list[torch.Tensor]) -> None:
    sample = WeightSample(held)
    sample.note()
    assert sample.is_there()
