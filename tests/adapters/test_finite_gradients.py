"""The check of many tensors for inf and nan in few kernels."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from holdfast.frameworks.torch import private_api

pytestmark = pytest.mark.torch

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.complex64)


class Calls(TorchDispatchMode):
    """Counts the operators that torch runs."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operator and count it."""
        self.count += 1
        return func(*args, **(kwargs or {}))


def gradients(count: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Return matrices, every second one with its numbers in another order in memory."""
    torch.manual_seed(count)
    made = [torch.randn(5, 3).to(dtype) for _ in range(count)]
    return [tensor.t() if number % 2 else tensor for number, tensor in enumerate(made)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
def test_one_bad_number_in_any_tensor_is_found(dtype: torch.dtype, bad: float) -> None:
    for number in range(4):
        held = gradients(4, dtype)
        held[number][2, 1] = bad
        assert private_api.nonfinite_flag(held)


@pytest.mark.parametrize("dtype", DTYPES)
def test_finite_numbers_keep_their_bits(dtype: torch.dtype) -> None:
    held = gradients(6, dtype)
    if dtype.is_floating_point:
        limits = torch.finfo(dtype)
        held[0][0] = torch.tensor([limits.max, limits.smallest_normal / 2, -0.0], dtype=torch.float64).to(
            dtype
        )
    before = [tensor.clone().contiguous().view(torch.uint8) for tensor in held]
    assert not private_api.nonfinite_flag([*held, torch.zeros(0, dtype=dtype)])
    after = [tensor.clone().contiguous().view(torch.uint8) for tensor in held]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_the_check_is_no_write_for_autograd() -> None:
    """A gradient may be a part of another graph, which refuses a tensor that was written."""
    held = gradients(3, torch.float32)
    before = [tensor._version for tensor in held]
    assert not private_api.nonfinite_flag(held)
    assert [tensor._version for tensor in held] == before


@pytest.mark.parametrize("number", [1.0, float("nan")])
def test_numbers_that_share_their_memory_are_checked_one_by_one(number: float) -> None:
    assert private_api.nonfinite_flag([torch.tensor(number).expand(3, 4)]) == (number != 1.0)


def test_the_number_of_operators_does_not_grow_with_the_number_of_tensors() -> None:
    """Regression: on a GPU a norm made one kernel for each weight, 4 ms of a step of 50 ms."""
    found = []
    for count in (2, 200):
        held = gradients(count, torch.float32)
        with torch.no_grad(), Calls() as calls:
            assert not private_api.nonfinite_flag(held)
        found.append(calls.count)
    assert found[0] == found[1]
