"""Copies of buffers from before the code before a block, and from the start of the block."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from holdfast.frameworks.torch.state.buffer_copies import SMALL_NUMEL, BufferCopies
from holdfast.frameworks.torch.state.parameter_names import names_of

pytestmark = pytest.mark.torch


class Holder(nn.Module):
    """A module with one buffer of ``numel`` elements."""

    held: torch.Tensor

    def __init__(self, numel: int) -> None:
        super().__init__()
        self.register_buffer("held", torch.zeros(numel))


def copies_of(module: Holder) -> tuple[BufferCopies, BufferCopies]:
    """Return the copies of both moments: before the code, and at the start of the block."""
    slots = names_of(module).buffers
    start = BufferCopies(slots)
    return BufferCopies(slots, start), start


def value(copies: BufferCopies) -> float:
    """Return the first element of the copy."""
    return float(copies.by_name()["held"][0])


@pytest.mark.parametrize("numel", [4, SMALL_NUMEL + 1])
def test_each_moment_keeps_its_values(numel: int) -> None:
    module = Holder(numel)
    before, start = copies_of(module)
    for step in range(3):
        module.held.fill_(10 * step)  # in the block before
        before.take()
        module.held.add_(1)
        start.take()
        module.held.add_(1)
        assert (value(before), value(start)) == (10 * step, 10 * step + 1)
        start.put_back()
        assert float(module.held[0]) == 10 * step + 1
        start.take()
        assert (value(before), value(start)) == (10 * step, 10 * step + 1)


def test_a_large_buffer_that_nothing_writes_is_copied_once() -> None:
    module = Holder(SMALL_NUMEL + 1)
    before, start = copies_of(module)
    before.take()
    first = before.by_name()["held"]
    for _ in range(3):
        start.take()
        before.take()
    assert start.by_name()["held"] is first is before.by_name()["held"]


@pytest.mark.parametrize("numel", [4, SMALL_NUMEL + 1])
def test_a_tensor_that_the_block_puts_in_its_place_is_taken_out_again(numel: int) -> None:
    module = Holder(numel)
    before, start = copies_of(module)
    before.take()
    start.take()
    held = module.held
    module.held = torch.ones(numel)
    start.put_back()
    assert module.held is held and float(held[0]) == 0


def test_memory_that_is_exchanged_twice_is_seen() -> None:
    """The second exchange may return to the address of the first memory, and torch counts none of them as a write."""
    module = Holder(SMALL_NUMEL + 1)
    before, start = copies_of(module)
    for step in range(4):
        before.take()
        start.take()
        assert value(before) == value(start) == 2 * step
        for _ in range(2):
            module.held.data = module.held.data + 1


@pytest.mark.parametrize("persistent", [False, True])
def test_a_table_outside_of_the_state_that_has_grown_stays(persistent: bool) -> None:
    """Regression: the run of a block for its check had the old table and the new size, and ended with an error."""
    module = Holder(4)
    module.register_buffer("table", torch.zeros(2), persistent=persistent)
    _, start = copies_of(module)
    start.take()
    module.table = torch.ones(3)
    module.held.add_(1)
    start.put_back()
    assert module.table.tolist() == ([0.0, 0.0] if persistent else [1.0, 1.0, 1.0])
    assert float(module.held[0]) == 0
    module.table = torch.ones(2)
    start.take()
    module.table = torch.full((2,), 5.0)
    start.put_back()
    assert module.table.tolist() == [1.0, 1.0], "a buffer of the same shape may be state"
