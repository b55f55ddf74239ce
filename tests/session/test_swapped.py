"""A script without a launcher that raises while its model contains other weights."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.session.test_solo import Job, bare, same

pytestmark = pytest.mark.torch


@pytest.mark.parametrize("where", ["before", "behind"])
@pytest.mark.parametrize("left", [True, False], ids=["left", "put back"])
def test_weights_that_are_none_of_the_training_are_not_saved(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, where: str, left: bool
) -> None:
    job = Job()
    (weight, *_) = job.net.parameters()

    def evaluate() -> None:
        kept = weight.data.clone()
        weight.data.mul_(0.5)
        if not left:
            weight.data.copy_(kept)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), job.session(checkpoint=tmp_path / "ckpt") as s:
        for step in s.steps(job.loader, until=3):
            if step.number == 2 and where == "before":
                evaluate()
            with step as batch:
                job.update(batch)
            if step.number == 1 and where == "behind":
                evaluate()
    assert ("step 2 was not saved: step 2: the script has changed weights" in caplog.text) == left
    after = Job()
    assert after.train(4, checkpoint=tmp_path / "ckpt") == ([0, 1, 2, 3] if left else [2, 3])
    assert same(after, bare(4))
