"""Optimizers that keep the whole state of a parameter on one rank, which sends its update to the others."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from holdfast.errors import CheckpointMismatch
from holdfast.frameworks.torch.state.state import TorchState
from holdfast.store.layouts.layout import Catalogue
from holdfast.store.layouts.layout_completion import catalogue_of

pytestmark = pytest.mark.torch

NAME = "optimizer.default.{}.momentum"


class Owning(torch.optim.Optimizer):
    """An optimizer with state for each second parameter."""

    def __init__(self, parameters: Any, rank: int, *, counts: bool = False) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self.rank = rank
        self.counts = counts

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for number, p in enumerate(group["params"]):
                if number % 2 == self.rank % 2:
                    self.state[p]["momentum"] = torch.full_like(p, 1.0 + number)
                    if self.counts:
                        self.state[p]["steps"] = 1


def of(rank: int, *, stepped: bool = True, counts: bool = False) -> TorchState:
    model = nn.Linear(4, 6)
    optimizer = Owning(model.parameters(), rank, counts=counts)
    if stepped:
        optimizer.step()
    return TorchState(model, {"default": optimizer})


def catalogue(*states: TorchState) -> Catalogue:
    world = len(states)
    layouts = {rank: state.collect().layout(rank, world) for rank, state in enumerate(states)}
    return catalogue_of({rank: layout.encode() for rank, layout in layouts.items()})


def holders(found: Catalogue, name: str) -> list[int]:
    return sorted(rank for _, ranks in found.boxes(found.by_fqn[NAME.format(name)]) for rank in ranks)


def test_no_layout_is_completed_with_state_that_one_rank_keeps() -> None:
    found = catalogue(of(0), of(1))
    assert holders(found, "weight") == [0] and holders(found, "bias") == [1]


def test_a_late_layout_is_still_completed() -> None:
    found = catalogue(of(0), of(0, stepped=False), of(0))
    assert holders(found, "weight") == [0, 1, 2]
    found = catalogue(of(0), of(1), of(0), of(1, stepped=False))
    assert holders(found, "weight") == [0, 2] and holders(found, "bias") == [1]


@pytest.mark.parametrize("stepped", [False, True])
@pytest.mark.parametrize(("rank", "name", "value"), [(0, "weight", 1.0), (1, "bias", 2.0)])
def test_a_process_takes_the_state_that_its_rank_kept(
    rank: int, name: str, value: float, stepped: bool
) -> None:
    """The plain values are from rank 0. Regression: a replacement got copies of the state of the other rank."""
    sources = [of(0), of(1)]
    fresh = of(rank, stepped=stepped)
    restore = fresh.restore(catalogue(*sources), sources[0].collect().values, (rank, 2))
    for meta, data in restore.buffers():
        holder = sources[rank] if meta.fqn.startswith("optimizer.") else sources[0]
        data[:] = holder.collect().view(meta.fqn, meta.box)
    restore.finish()
    kept = {fqn: each for fqn, each in fresh.collect().tensors.items() if fqn.startswith("optimizer.")}
    assert list(kept) == [NAME.format(name)]
    assert set(kept[NAME.format(name)].flatten().tolist()) == {value}


def test_a_job_of_one_process_takes_the_state_of_all() -> None:
    sources = [of(0), of(1)]
    fresh = of(0, stepped=False)
    restore = fresh.restore(catalogue(*sources), sources[0].collect().values, (0, 1))
    assert {NAME.format("weight"), NAME.format("bias")} <= set(restore.targets)


def test_another_number_of_ranks_is_refused_by_name() -> None:
    sources = [of(0), of(1)]
    with pytest.raises(
        CheckpointMismatch, match=r"momentum: the optimizer kept it on some of 2 ranks, and this"
    ):
        of(0).restore(catalogue(*sources), sources[0].collect().values, (0, 3))


def test_a_number_beside_the_tensors_is_refused_by_name() -> None:
    """The plain values are from one rank, which lacks the numbers of the other."""
    sources = [of(0, counts=True), of(1, counts=True)]
    with pytest.raises(CheckpointMismatch, match=r"and with it 'steps': only tensors can be distinguished"):
        of(0).restore(catalogue(*sources), sources[0].collect().values, (0, 2))
