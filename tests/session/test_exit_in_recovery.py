"""A graceful exit that is asked for while a replacement starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.exit_codes import Exit
from holdfast.store.manage.checkpoint_root import Root
from tests.runtime.runs import until
from tests.session.launch import BOUND_S, end, start_job
from tests.session.slow_replacement_job import REPLACING, STRUCK_AT

pytestmark = [pytest.mark.torch, pytest.mark.processes]

JOB = str(Path(__file__).with_name("slow_replacement_job.py"))


def test_an_exit_does_not_wait_for_a_replacement(tmp_path: Path) -> None:
    """Regression: the exit waited for the replacement. The deadline passed, and the committed steps were lost."""
    with (tmp_path / "out").open("wb") as output:
        job = start_job(tmp_path, 2, output, "--grace-s", "20", JOB)
        try:
            until("a replacement starts", lambda: (tmp_path / REPLACING).exists(), BOUND_S)
            job.terminate()
            code = job.wait(BOUND_S)
        finally:
            end(tmp_path)
            job.wait()
    said = (tmp_path / "out").read_text(errors="replace")
    assert code == Exit.REQUEUE, said
    assert Root(tmp_path / "ckpts").newest_valid(deep=True).require().step == STRUCK_AT, said
