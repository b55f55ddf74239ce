"""Modules that have the names which a checkpoint uses beside the model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import holdfast
from holdfast.errors import CheckpointMismatch, StateError
from holdfast.frameworks.torch.adapter import TorchAdapter

pytestmark = pytest.mark.torch

KINDS = ("optimizer", "scheduler", "scaler", "state")


class Net(nn.Module):
    """A model whose modules may have the names of the parts of a training."""

    def __init__(self, *names: str) -> None:
        super().__init__()
        self.first = nn.Linear(2, 2)
        for name in names:
            self.add_module(name, nn.BatchNorm1d(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply all modules, one after the other."""
        for module in self.children():
            x = module(x)
        return x


def train(net: Net, until: int, folder: Path, part: nn.Module | None = None, **arguments: Any) -> None:
    """Train all parameters, or those of a part, in a session."""
    optimizer = torch.optim.AdamW((part or net).parameters(), lr=0.1)
    data = [torch.tensor([[1.0, 2.0], [n, n + 3.0]]) for n in range(6)]
    with holdfast.session(model=net, optimizer=optimizer, checkpoint=folder, **arguments) as s:
        for step in s.steps(data, until=until):
            with step as x:
                (net(x) - 1).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()


def made(*names: str) -> Net:
    """Return a model with fixed weights."""
    torch.manual_seed(1)
    return Net(*names)


def test_a_module_of_such_a_name_is_missed(tmp_path: Path) -> None:
    train(made(*KINDS), 2, tmp_path)
    for absent in KINDS:
        fewer = made(*(kind for kind in KINDS if kind != absent))
        with pytest.raises(CheckpointMismatch, match=rf"unexpected: {absent}\.bias"):
            holdfast.load(tmp_path, fewer)
        assert f"{absent}.bias" in holdfast.load(tmp_path, fewer, strict=False).unexpected
    # An optimizer of other parameters would be refused first: this one updates the common parameters.
    more, less = made("state"), made()
    train(more, 2, tmp_path / "c", more.first)
    with pytest.raises(CheckpointMismatch, match=r"unexpected: state\.bias"):
        train(less, 3, tmp_path / "c", less.first)


def test_such_a_model_goes_on_bit_for_bit(tmp_path: Path) -> None:
    whole, again = made(*KINDS), made(*KINDS)
    train(whole, 6, tmp_path / "a")
    train(made(*KINDS), 3, tmp_path / "b", state={"ema": torch.ones(3)})
    train(again, 6, tmp_path / "b", state={"ema": torch.zeros(3)})
    assert all(map(torch.equal, again.state_dict().values(), whole.state_dict().values()))
    with pytest.raises(StateError, match=r"two tensors of the state are called 'state\.weight'"):
        train(made("state"), 1, tmp_path / "c", state={"weight": torch.ones(2)})


def test_its_buffers_may_differ_between_ranks() -> None:
    net = made("optimizer")
    optimizer = torch.optim.AdamW(net.parameters())
    adapter = TorchAdapter(net, optimizer, None, None, {}, 0)
    assert adapter.compares("optimizer.weight") and adapter.compares("optimizer.default.first.weight.exp_avg")
    assert not adapter.compares("optimizer.running_mean")
