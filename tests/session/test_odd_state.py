"""State of unusual forms: it comes back, or is refused by name when the session is entered."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import holdfast
from holdfast.adapters.torch.imports import import_checkpoint

pytestmark = pytest.mark.torch


def net(**buffers: torch.Tensor) -> nn.Module:
    """A small model with these buffers."""
    torch.manual_seed(2)
    made = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    for name, buffer in buffers.items():
        made.register_buffer(name, buffer)
    return made


def train(model: nn.Module, until: int, folder: Path, state: dict[str, Any] | None = None) -> None:
    """Train in a session."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(TensorDataset(torch.arange(96.0).reshape(24, 4)), batch_size=4)
    with holdfast.session(model=model, optimizer=optimizer, checkpoint=folder, state=state) as s:
        for step in s.steps(loader, until=until):
            with step as (x,):
                model(x).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()


def test_conjugated_views(tmp_path: Path) -> None:
    numbers = torch.tensor([1 + 2j, 3 - 4j])
    first = {"phase": numbers.conj(), "sign": numbers.conj().imag}
    assert first["phase"].is_conj() and first["sign"].is_neg()
    train(net(**first), 2, tmp_path / "a", state={"seen": {"it": numbers.conj()}})
    zeros = torch.zeros(2, dtype=torch.complex64)
    second = net(phase=zeros.conj(), sign=zeros.clone().conj().imag)
    state = {"seen": {"it": torch.zeros(0)}}
    train(second, 3, tmp_path / "a", state)
    for found in (second.get_buffer("phase"), state["seen"]["it"]):
        assert found.tolist() == [1 - 2j, 3 + 4j]
    assert second.get_buffer("sign").tolist() == [-2.0, 4.0]
    torch.save({"0.weight": first["phase"]}, tmp_path / "w.pt")
    target = nn.Sequential(nn.Linear(2, 1, bias=False))
    target[0].weight = nn.Parameter(torch.zeros(2, dtype=torch.complex64))
    holdfast.load(import_checkpoint(tmp_path / "w.pt", tmp_path / "b"), target)
    assert target[0].weight.tolist() == [1 - 2j, 3 + 4j]
