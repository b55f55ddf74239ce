"""A training whose blocks change nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

import holdfast
from holdfast.errors import StepError
from tests.session.test_solo import Job

pytestmark = pytest.mark.torch


@pytest.mark.parametrize("steps", [3, 30])
def test_a_training_that_never_updates_is_refused(tmp_path: Path, steps: int) -> None:
    """``optimizer.step()`` forgotten: all steps were committed, and the job ran to its end."""
    job = Job()
    with (
        pytest.raises(StepError, match=rf"{min(steps, 10)} blocks from step 0 on.*test_empty\.py:\d+"),
        holdfast.session(model=job.net, optimizer=job.optimizer, checkpoint=tmp_path) as s,
    ):
        for step in s.steps(job.loader, until=steps):
            with step as batch:
                (job.net(batch[0]) - batch[1]).square().mean().backward()
                job.optimizer.zero_grad()


def test_a_training_may_begin_with_blocks_that_leave_their_batch_out(tmp_path: Path) -> None:
    job = Job()
    with holdfast.session(model=job.net, optimizer=job.optimizer, checkpoint=tmp_path) as s:
        for step in s.steps(job.loader, until=5):
            with step as batch:
                if step.number > 2:
                    job.update(batch)
    assert s.step == 5
