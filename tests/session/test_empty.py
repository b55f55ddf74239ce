"""A training whose blocks change nothing."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from holdfast.errors import StepError
from tests.session.test_solo import Job

pytestmark = pytest.mark.torch


@pytest.mark.parametrize("steps", [3, 30])
def test_a_training_that_never_updates_is_refused(tmp_path: Path, steps: int) -> None:
    """Regression: with ``optimizer.step()`` forgotten, all steps were committed and the job ran to its end."""
    job = Job()
    with (
        pytest.raises(StepError, match=rf"{min(steps, 10)} blocks from step 0 on.*test_empty\.py:\d+"),
        holdfast.session(model=job.net, optimizer=job.optimizer, checkpoint=tmp_path) as s,
    ):
        for step in s.steps(job.loader, until=steps):
            with step as batch:
                (job.net(batch[0]) - batch[1]).square().mean().backward()
                job.optimizer.zero_grad()


def without_updates(job: Job, where: Path, *, fail_at: int) -> None:
    """Train without a call of ``optimizer.step()``. The script fails in step ``fail_at``."""
    with holdfast.session(model=job.net, optimizer=job.optimizer, checkpoint=where, save_every_steps=1) as s:
        for step in s.steps(job.loader, until=30):
            with step as batch:
                (job.net(batch[0]) - batch[1]).square().mean().backward()
                job.optimizer.zero_grad()
                if step.number == fail_at:
                    raise ZeroDivisionError


def test_a_training_that_never_updates_is_refused_after_a_restart(tmp_path: Path) -> None:
    """Regression: a process that began after step 0 was not checked, and the job ran to its end."""
    with pytest.raises(ZeroDivisionError):
        without_updates(Job(), tmp_path, fail_at=4)
    with pytest.raises(StepError, match="10 blocks from step 4 on, and no optimizer"):
        without_updates(Job(), tmp_path, fail_at=-1)


def test_the_last_blocks_of_a_restarted_training_may_leave_their_batches_out(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError):
        without_updates(Job(), tmp_path, fail_at=4)
    job = Job()
    with holdfast.session(model=job.net, optimizer=job.optimizer, checkpoint=tmp_path) as s:
        for step in s.steps(job.loader, until=6):
            with step:
                pass
    assert s.step == 6


@pytest.mark.parametrize("mistake", ["no backward", "gradients removed before the update"])
def test_a_training_whose_optimizer_has_no_gradients_is_refused(tmp_path: Path, mistake: str) -> None:
    job = Job()
    with (
        pytest.raises(StepError, match=r"10 blocks .* no gradient was there .*test_empty\.py:\d+") as refused,
        holdfast.session(model=job.net, optimizer=job.optimizer, checkpoint=tmp_path) as s,
    ):
        for step in s.steps(job.loader, until=30):
            with step as batch:
                loss = (job.net(batch[0]) - batch[1]).square().mean()
                if mistake != "no backward":
                    loss.backward()
                    job.optimizer.zero_grad()
                job.optimizer.step()
    assert "zero_grad() after it" in refused.value.hint


class Searching(torch.optim.Optimizer):
    """An optimizer that uses no gradients: it moves the weights directly."""

    def __init__(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]
        """Move the weights."""
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.add_(1e-3)


def test_an_optimizer_that_needs_no_gradients_is_no_mistake(tmp_path: Path) -> None:
    job = Job()
    optimizer = Searching(job.net.parameters())
    with holdfast.session(model=job.net, optimizer=optimizer, checkpoint=tmp_path) as s:
        for step in s.steps(job.loader, until=15):
            with step as batch:
                job.net(batch[0])
                optimizer.step()
    assert s.step == 15


def test_a_training_may_begin_with_blocks_that_leave_their_batch_out(tmp_path: Path) -> None:
    job = Job()
    arguments: dict[str, Any] = {"model": job.net, "optimizer": job.optimizer, "scheduler": job.scheduler}
    with holdfast.session(**arguments, checkpoint=tmp_path) as s:
        for step in s.steps(job.loader, until=5):
            with step as batch:
                if step.number > 2:
                    job.update(batch)
    assert s.step == 5
