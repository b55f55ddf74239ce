"""A checkpoint is loaded into an optimizer that did not write it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import holdfast
from holdfast.errors import CheckpointMismatch
from tests.session.test_solo import Job

pytestmark = pytest.mark.torch


def test_another_optimizer_is_refused_and_nothing_is_written(tmp_path: Path) -> None:
    Job().train(2, checkpoint=tmp_path)
    other = Job()
    other.optimizer = torch.optim.SGD(other.net.parameters(), lr=0.01)
    other.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(other.optimizer, 20)
    before = [p.clone() for p in other.net.parameters()]
    with pytest.raises(CheckpointMismatch, match=rf"{tmp_path}.*'default'.* AdamW .*exp_avg.* SGD "):
        other.train(3, checkpoint=tmp_path)
    assert all(map(torch.equal, before, other.net.parameters()))
    assert other.train(3, checkpoint=tmp_path, resume="never") == [0, 1, 2]


def test_an_optimizer_of_other_parameters_is_refused(tmp_path: Path) -> None:
    """torch refuses such a load, too.

    Otherwise a layer's moments would silently start at zero or be lost at the next save.
    """

    def train(first: list[nn.Parameter], *more: list[nn.Parameter], job: Job) -> list[int]:
        job.optimizer = torch.optim.AdamW([{"params": group} for group in (first, *more)], lr=0.01)
        job.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(job.optimizer, 20)
        return job.train(3, checkpoint=tmp_path)

    job = Job()
    body, head = list(job.net[0].parameters()), list(job.net[4].parameters())
    assert train(body, head, job=job) == [0, 1, 2]
    for first, second, why in (
        (body, head[:1], r"no longer updates 4\.bias$"),
        (body + list(job.net[1].parameters()), head, r"now updates, too, 1\.bias, 1\.weight$"),
        (head, body, r"in another group is 0\.bias, 0\.weight, 4\.bias, \.\.\.$"),
    ):
        with pytest.raises(CheckpointMismatch) as caught:
            train(first, second, job=job)
        assert re.search(why, caught.value.message), caught.value.message
    with pytest.raises(CheckpointMismatch, match="has 1 parameter groups, the checkpoint 2"):
        train(body + head, job=job)


class Counting(torch.optim.SGD):
    """An optimizer that keeps a number and a tensor that belong to no parameter."""

    def step(self, closure: Any = None) -> Any:
        """Count, and update."""
        state: Any = self.state
        state["calls"] = state.get("calls", 0) + 1
        state["pace"] = {"sum": state.get("pace", {"sum": torch.zeros(2)})["sum"] + 1.5}
        return super().step(closure)


def test_what_an_optimizer_keeps_of_no_parameter_goes_on(tmp_path: Path) -> None:
    def counting() -> Job:
        job = Job()
        job.optimizer = Counting(job.net.parameters(), lr=0.01)
        job.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(job.optimizer, 20)
        return job

    counting().train(2, checkpoint=tmp_path)
    job = counting()
    job.train(3, checkpoint=tmp_path)
    state: Any = job.optimizer.state
    assert state["calls"] == 3
    assert state["pace"]["sum"].tolist() == [4.5, 4.5]


def test_one_process_may_search_along_a_line(tmp_path: Path) -> None:
    def train(folder: Path | None) -> list[torch.Tensor]:
        """Train in two sessions, or undisturbed without a folder."""
        torch.manual_seed(0)
        net = nn.Linear(8, 1)
        optimizer: Any = torch.optim.LBFGS(net.parameters(), max_iter=4, line_search_fn="strong_wolfe")
        data = [(torch.randn(8, 8), torch.randn(8, 1)) for _ in range(6)]

        def update(x: torch.Tensor, y: torch.Tensor) -> None:
            def closure() -> Any:
                optimizer.zero_grad()
                loss: Any = (net(x) - y).square().mean()
                loss.backward()
                return loss

            optimizer.step(closure)

        if folder is None:
            for x, y in data:
                update(x, y)
            return list(net.parameters())
        with holdfast.session(model=net, optimizer=optimizer, checkpoint=folder) as s:
            for step in s.steps(data, until=3 if s.step == 0 else 6):
                with step as (x, y):
                    update(x, y)
        return list(net.parameters())

    train(tmp_path)
    assert all(map(torch.equal, train(tmp_path), train(None)))
