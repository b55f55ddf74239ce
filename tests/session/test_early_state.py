"""State of an optimizer that a block changes before its update: averages of norms, by which gradients are clipped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import holdfast
from holdfast.frameworks.torch.state.early_state import FIRST_BLOCKS, EarlyState

pytestmark = pytest.mark.torch

UNTIL = 14


class Adaptive(torch.optim.AdamW):
    """An optimizer that clips gradients by an average of their norms in its state, from the second update on."""

    def clip(self) -> None:
        """Clip the gradients of all parameters, and update the averages."""
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                norm = parameter.grad.norm()
                if not state:
                    continue
                average = state.setdefault("norm", norm.clone())
                state["clips"] = state.get("clips", 0) + 1
                factor = (0.5 * average / norm).clamp(max=1.0)
                parameter.grad.mul_(factor)
                average.lerp_(norm * factor, 0.3)


def train(root: Path, until: int, every: int) -> tuple[torch.Tensor, list[Any]]:
    """Train in one process until step ``until``; return the weights, and the averages and counts."""
    torch.manual_seed(3)
    net = nn.Linear(4, 1)
    optimizer = Adaptive(net.parameters(), lr=0.1)
    x = torch.randn(24, 4, generator=torch.Generator().manual_seed(1))
    with holdfast.session(model=net, optimizer=optimizer, checkpoint=root, verify_block=every) as s:
        for step in s.steps(DataLoader(TensorDataset(x), 4), until=until):
            with step as (batch,):
                net(batch).square().mean().backward()
                optimizer.clip()
                optimizer.step()
                optimizer.zero_grad()
    kept = [
        value for p in net.parameters() for value in (optimizer.state[p]["norm"], optimizer.state[p]["clips"])
    ]
    return torch.cat([p.detach().flatten() for p in net.parameters()]), kept


def test_a_check_leaves_the_averages_as_they_were(tmp_path: Path) -> None:
    unchecked, kept = train(tmp_path / "a", UNTIL, 0)
    for every in (2, FIRST_BLOCKS + 4):
        weights, averages = train(tmp_path / f"b{every}", UNTIL, every)
        assert torch.equal(weights, unchecked) and averages == kept


def test_a_resumed_process_checks_its_first_block(tmp_path: Path) -> None:
    undisturbed, kept = train(tmp_path / "a", UNTIL, 2000)
    train(tmp_path / "b", 5, 2000)
    weights, averages = train(tmp_path / "b", UNTIL, 2000)
    assert torch.equal(weights, undisturbed) and averages == kept


def test_entries_are_copied_until_they_are_known_and_then_by_name() -> None:
    parameter = nn.Parameter(torch.zeros(3))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    early = EarlyState({"default": optimizer})
    entries = optimizer.state[parameter]
    entries.update(norm=torch.tensor(1.0), momentum=torch.zeros(3))
    for number in range(FIRST_BLOCKS + 2):
        early.take()
        entries["norm"] += 1.0
        entries["clips"] = number
        before = early.before(optimizer, optimizer.state)[parameter]
        assert float(before["norm"]) == 1.0 and "clips" not in before
        early.compare("default")
        early.put_back()
        assert float(entries["norm"]) == 1.0 and "clips" not in entries
    early.take()
    entries["momentum"] += 1.0  # a name that no block has changed before its update
    early.put_back()
    assert entries["momentum"].tolist() == [1.0] * 3
    early.clear()
    assert early.before(optimizer, optimizer.state) is optimizer.state
