"""The order of a tensor's elements in memory, which decides the last bits of a matrix product.

Optimizers that keep eigenvectors (SOAP, Shampoo) have state in column-major order, and in lists.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from holdfast.errors import CheckpointInvalid
from holdfast.frameworks.torch.state.optimizer_state import Undo, allocate
from holdfast.frameworks.torch.state.state import TorchState
from tests.adapters.test_state import copy_over, same

pytestmark = pytest.mark.torch


class Rotating(torch.optim.Optimizer):
    """An optimizer whose state is in several memory orders."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model.parameters(), {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]
        """Give each weight new state, some of it with the transposed order."""
        for group in self.param_groups:
            for p in group["params"]:
                rows = len(p)
                square = torch.randn(rows, rows)
                self.state[p] = {
                    "bases": [torch.linalg.qr(square).Q, square, torch.randn(rows, rows).t()],
                    "like_weight": torch.randn(*reversed(p.shape)).permute(*reversed(range(p.ndim))),
                    "usual": torch.randn_like(p),
                    "images": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
                    "none": None,
                }


def strides(value: Any) -> Any:
    """Return the strides of all tensors in a tree."""
    if isinstance(value, torch.Tensor):
        return value.stride()
    if isinstance(value, dict):
        return {key: strides(item) for key, item in value.items()}
    return [strides(item) for item in value] if isinstance(value, list) else None


def made(seed: int) -> tuple[nn.Module, Rotating, TorchState]:
    """Return a model with weights in row-major and channels-last order, its optimizer, and their state."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 6), nn.Conv2d(3, 4, 2).to(memory_format=torch.channels_last))  # type: ignore[call-overload]
    optimizer = Rotating(model)
    return model, optimizer, TorchState(model, {"default": optimizer})


@pytest.mark.parametrize("has_state", [False, True])
def test_state_comes_back_in_its_memory_order(has_state: bool) -> None:
    """Regression: it came back in C order, and an update had other last bits than on the ranks that were not lost."""
    _, one, source = made(1)
    one.step()
    _, two, target = made(2)
    if has_state:
        two.step()
        for state in two.state.values():  # of the right shape, in another order
            state["usual"], state["like_weight"] = state["like_weight"], state["usual"]
    copy_over(source, target)
    assert same(one.state_dict(), two.state_dict())
    assert strides(one.state_dict()["state"]) == strides(two.state_dict()["state"])


def test_a_state_that_appears_in_a_list_changes_the_layout() -> None:
    """Regression: the number of entries stayed the same, and the other ranks did not learn of the new tensors."""
    _, optimizer, state = made(1)
    optimizer.step()
    (first, *_) = optimizer.state.values()
    found = [state.size()]
    for value in ([], [torch.zeros(2)], [torch.zeros(3)], {"a": torch.zeros(3)}):
        first["none"] = value
        found.append(state.size())
    assert len(set(found)) == len(found) and found[-1] == state.size()


def test_an_update_is_undone_into_the_same_memory_order() -> None:
    _, optimizer, _ = made(1)
    optimizer.step()
    before, due = strides(optimizer.state_dict()["state"]), optimizer.state_dict()["state"]
    undo = Undo()
    undo.record(optimizer)
    for state in optimizer.state.values():
        state["bases"] = [base.t() for base in state["bases"]]
    undo.restore()
    after = optimizer.state_dict()["state"]
    assert strides(after) == before and same(after[0]["usual"], due[0]["usual"])


@pytest.mark.parametrize("order", [(0,), (0, 0), (0, 2), (0, 1, 2)])
def test_a_damaged_order_is_refused(order: tuple[int, ...]) -> None:
    with pytest.raises(CheckpointInvalid, match="is no order of 2 dimensions"):
        allocate((2, 3), torch.float32, None, order=order)
