"""Variables that an aborted block has not assigned: the code after the block finds a value in them."""

from __future__ import annotations

import copy
import logging
import math
from types import TracebackType
from typing import Any

import pytest
import torch
from torch import nn

from holdfast.errors import StepError
from holdfast.session.variables.unassigned_variables import NotAssigned, NotComputed, bind, exchange


class Left:
    """A context manager that swallows the exception of its body, as the block of a step does."""

    def __enter__(self) -> None:
        exchange(inside=True)

    def __exit__(self, kind: object, error: object, trace: TracebackType | None) -> bool:
        exchange(inside=False)
        if isinstance(error, ValueError):
            bind(trace)
        return isinstance(error, ValueError)


def cut_off() -> Any:
    raise ValueError("a fault")


def test_a_name_that_the_block_did_not_assign_has_a_value(caplog: pytest.LogCaptureFixture) -> None:
    seen = "before"
    with Left():
        seen = "in the block"
        cut, (first, second) = cut_off(), cut_off()
    assert seen == "in the block"
    assert math.isnan(cut) and math.isnan(first + second)
    inner = [lambda: cut]  # a closure cell
    assert math.isnan(inner[0]())
    with caplog.at_level(logging.WARNING, "holdfast"):
        assert f"{cut.detach().cpu().item():.4f} {first['sum']}" == "nan nan"
        assert (cut < 1, list(cut)) == (False, [])
    assert caplog.text.count("code after the block uses 'cut'") == 1


def test_a_value_of_an_earlier_block_stays() -> None:
    for number in range(2):
        with Left():
            value = number if number == 0 else cut_off()
        assert value == 0


def use(number: int, batches: Any) -> None:
    """Use what an aborted block has left."""
    match number:
        case 0:
            print(list(batches))
        case 1:
            torch.zeros(2) - batches
        case 2:
            batches or print()
        case 3:
            f"{batches[0] + 1}"


@pytest.mark.torch
@pytest.mark.parametrize("number", range(4))
def test_a_block_does_not_compute_with_it(number: int) -> None:
    """Regression: it was a nan or an empty list there, in a replacement alone."""
    batches: Any
    with Left():
        cut_off()
        batches = [1.0]
    assert math.isnan(batches)
    with pytest.raises(StepError, match="the block uses 'batches', to which this process has not"), Left():
        assert f"{batches}" == "nan" and isinstance(batches, NotAssigned)
        use(number, batches)
    assert math.isnan(batches)
    with Left():
        batches = [2.0]
    assert batches == [2.0]


def test_an_attribute_of_a_variable_without_a_value_names_the_variable() -> None:
    unassigned: Any = NotAssigned("x")
    with pytest.raises(StepError, match="the block uses 'x', to which this process has not assigned a value"):
        unassigned.to("cpu")
    assert not hasattr(unassigned, "bit_generator") and isinstance(copy.copy(unassigned), NotAssigned)
    with pytest.raises(StepError, match="the block uses 'x'"):
        torch.ones(2) + unassigned


@pytest.mark.parametrize("number", range(3))
def test_a_function_of_torch_names_the_variable(number: int) -> None:
    """Regression: ``torch.cat`` said that it had got a NotAssigned, and the run ended without a word on the cause."""
    drawn: Any = NotAssigned("drawn")
    uses = (
        lambda: torch.cat((torch.zeros(1), drawn)),
        lambda: nn.functional.linear(drawn, weight=torch.zeros(1, 1)),
        lambda: torch.stack(tensors=[torch.zeros(1), drawn]),
    )
    with pytest.raises(StepError, match="the block uses 'drawn', to which this process has not assigned"):
        uses[number]()


def test_a_frame_further_out_has_it_too() -> None:
    def block() -> None:
        with Left():
            assert isinstance(loss, NotAssigned)

    with Left():
        cut_off()
        loss = 1.0
    block()
    assert math.isnan(loss)


def test_in_a_module_too() -> None:
    names: dict[str, Any] = {"Left": Left, "cut_off": cut_off}
    exec("with Left():\n    loss = cut_off()\nprinted = f'{loss:.2f}'", names)
    assert isinstance(names["loss"], NotComputed) and names["printed"] == "nan"
