"""The settings of an optimizer that ranks compare before an update."""

from __future__ import annotations

import pytest
import torch

from holdfast.frameworks.torch.state.optimizer_state import scheduled_settings

pytestmark = pytest.mark.torch


def test_settings_of_all_groups_also_in_tensors_of_the_host() -> None:
    first, second = (torch.nn.Parameter(torch.zeros(2)) for _ in range(2))
    groups = [
        {"params": [first], "lr": torch.tensor(0.5)},
        {"params": [second], "lr": 0.25, "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, weight_decay=0.125, betas=(0.5, 0.75))
    assert scheduled_settings(optimizer) == {
        "lr": [0.5, 0.25],
        "weight_decay": [0.125, 0.0],
        "momentum": [],
        "betas": [0.5, 0.75, 0.5, 0.75],
    }
    optimizer.param_groups[0]["lr"] = torch.empty((), device="meta")
    assert scheduled_settings(optimizer)["lr"] == [0.25]
