"""The batch of a block when the block runs on it again."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from holdfast.errors import UnsupportedError
from holdfast.frameworks.torch.data.tensor_marks import duplicate, mark
from holdfast.frameworks.torch.state.tensor_memory import share_memory
from holdfast.session.steps.batches import Batches

pytestmark = pytest.mark.torch


class Tensors:
    """The operations on batches, from torch."""

    mark = staticmethod(mark)
    duplicate = staticmethod(duplicate)
    share_memory = staticmethod(share_memory)


def drawn() -> dict[str, Any]:
    return {"x": torch.ones(3), "y": torch.arange(3), "a": np.zeros(2)}


def settled(batch: dict[str, Any]) -> Batches:
    """Return batches after a block without effect has run on one; ``batch`` comes next."""
    batches = Batches(Tensors())
    batches.put([drawn()])
    batches.give(0)
    batches.put([batch])
    return batches


def test_every_run_finds_what_the_first_one_found() -> None:
    batches = Batches(Tensors())
    for _ in range(3):
        batches.put([drawn()])
        for _ in range(3):
            assert not batches.spoiled(0)
            given = batches.give(0)
            x, y = given["x"], given.pop("y")
            assert x.tolist() == [1, 1, 1] and y.tolist() == [0, 1, 2] and given["a"].tolist() == [0, 0]
            x.mul_(2)
            given["a"] += 1


def test_a_tensor_that_no_block_writes_is_not_copied() -> None:
    batch = drawn()
    assert settled(batch).give(0)["x"] is batch["x"]


@pytest.mark.parametrize(
    "change", [lambda x: x.mul_(2), lambda x: x.requires_grad_(), lambda x: x.unsqueeze_(0)]
)
def test_a_block_that_changes_a_tensor_for_the_first_time_has_it_drawn_again(change: Any) -> None:
    batches = settled(drawn())
    change(batches.give(0)["x"])
    assert batches.spoiled(0)
    batches.again([drawn()])
    again = drawn()
    for _ in range(2):
        assert not batches.spoiled(0)
        change(batches.give(0)["x"])
    batches.put([again])
    change(batches.give(0)["x"])
    assert torch.equal(again["x"], drawn()["x"]) and not again["x"].requires_grad


def test_a_loader_that_keeps_what_a_block_has_written_is_refused() -> None:
    batch = drawn()
    batches = settled(batch)
    batches.give(0)["x"].mul_(2)
    with pytest.raises(UnsupportedError, match="written in place into a batch that the loader keeps"):
        batches.again([{**batch, "x": batch["x"][:2]}])


class Nested:
    """An object that consists of its attributes."""

    def __init__(self, **held: Any) -> None:
        self.__dict__.update(held)


def test_an_object_of_tensors_is_given_again_as_it_was() -> None:
    """Regression: blocks with such batches (DETR) were not checked."""
    batches = Batches(Tensors())
    batches.put([(Nested(**drawn()), 1)])
    for _ in range(3):
        assert not batches.spoiled(0) and not batches.uncopied(0)
        given, _ = batches.give(0)
        assert given.x.tolist() == [1, 1, 1] and given.y.tolist() == [0, 1, 2]
        given.x.mul_(2)
        given.y = None


def test_an_object_that_nothing_is_known_of_is_drawn_again() -> None:
    batches = settled({"x": torch.ones(1), "graph": object()})
    assert not batches.spoiled(0)
    batches.give(0)
    assert batches.spoiled(0)


def test_a_block_that_was_cut_off_before_it_wrote_is_not_taken_for_one_that_does_not() -> None:
    batches = Batches(Tensors())
    batches.put([drawn()])
    batches.give(0)
    batches.give(0)["x"].mul_(2)
    assert not batches.spoiled(0) and batches.give(0)["x"].tolist() == [1, 1, 1]
