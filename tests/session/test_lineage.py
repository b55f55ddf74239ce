"""Several starts, and several runs, in one directory of checkpoints."""

from __future__ import annotations

import logging
import os
import signal
import time
from pathlib import Path

import pytest

from holdfast.exit_codes import Exit
from holdfast.store.manage.checkpoint_root import Root
from holdfast.store.manage.lineage import lineage_of
from tests.session.test_solo import Job, bare, same

pytestmark = pytest.mark.torch


def aged(root: Path, age_s: float) -> None:
    """Set the time of all files there to an earlier one."""
    at = time.time() - age_s
    for path in root.iterdir():
        os.utime(path, (at, at))


def steps(root: Path) -> list[int]:
    """Return the steps of all saves, newest first."""
    return [v.step for v in Root(root).list()]


def leave_after(root: Path, count: int) -> None:
    """Run one start that is asked to exit after ``count`` steps, as by a scheduler."""
    job = Job()
    with pytest.raises(SystemExit) as left, job.session(checkpoint=root, keep=1) as s:
        begin = s.step
        for step in s.steps(job.loader, until=1000):
            with step as batch:
                job.update(batch)
            if step.number == begin + count:
                os.kill(os.getpid(), signal.SIGTERM)
                until_s = time.monotonic() + 30
                while not s._rank.exit_source and time.monotonic() < until_s:
                    time.sleep(0.01)
    assert left.value.code == Exit.REQUEUE


def test_exit_checkpoints_do_not_pile_up(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Each start is a new run, which may prune the checkpoint that it came from."""
    for number in range(4):
        leave_after(tmp_path, 3)
        assert len(steps(tmp_path)) == 1, f"after start {number}"
    (reached,) = steps(tmp_path)
    assert len(lineage_of(Root(tmp_path).list()[0].path).ancestors) == 3
    job = Job()
    job.train(reached + 3, checkpoint=tmp_path, keep=1)
    assert same(job, bare(reached + 3))
    assert steps(tmp_path) == [reached + 3]
    assert "saved last" not in caplog.text


def test_another_job_does_not_remove_a_finished_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    Job().train(5, checkpoint=tmp_path)
    aged(tmp_path, 7200)
    with caplog.at_level(logging.WARNING, "holdfast"):
        Job().train(12, checkpoint=tmp_path, resume="never", save=3, keep=1)
    assert steps(tmp_path) == [12, 5]
    assert caplog.text.count("holds checkpoints of another run, the newest is step-00000005.") == 1


def test_an_abandoned_run_takes_nothing_from_the_new_one_and_resuming_it_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    job = Job()
    with job.session(checkpoint=tmp_path, save=10, keep=3) as s:
        for step in s.steps(job.loader, until=30):
            with step as batch:
                job.update(batch)
            s._saver._background.wait()
    aged(tmp_path, 7200)
    job = Job()
    with job.session(checkpoint=tmp_path, resume="never", save=2, keep=3) as s:
        for step in s.steps(job.loader, until=8):
            with step as batch:
                job.update(batch)
            s._saver._background.wait()
    assert steps(tmp_path) == [30, 20, 10, 8, 6, 4]
    newest, newer = Root(tmp_path).list()[0], Root(tmp_path).list()[3]
    caplog.clear()
    with caplog.at_level(logging.INFO, "holdfast"):
        assert Job().train(31, checkpoint=tmp_path) == [30]
    assert f"{newest.name} has the highest step, but another run" in caplog.text
    assert f"saved last: {newer.name}; to continue with that one: resume='{newer.path}'" in caplog.text
    assert "resumed at step 30" in caplog.text
    caplog.clear()
    with caplog.at_level(logging.INFO, "holdfast"):
        assert Job().train(32, checkpoint=tmp_path) == [31], "what wrote last came from what was chosen"
        assert Job().train(9, checkpoint=tmp_path, resume=newer.path) == [8]
    assert "saved last" not in caplog.text
