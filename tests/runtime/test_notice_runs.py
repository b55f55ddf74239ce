"""A notice for the only node of a job: a withdrawn one disturbs nothing; with a deadline, all ranks leave before it."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.exit_codes import Exit
from tests.runtime.runs import Run, until

pytestmark = pytest.mark.processes


def test_a_job_of_one_node_leaves_before_the_deadline_of_its_notice(tmp_path: Path) -> None:
    leave = tmp_path / "leave"
    with Run(tmp_path, args=("100000",), nproc=1, notices=f"file={leave}") as run:
        agent = run.start()
        run.wait_event("member_started")
        leave.touch()
        run.wait_event("node_leaves")
        leave.unlink()
        run.wait_event("node_stays")
        leave.write_text("5")
        assert agent.wait(60) == Exit.UNSAVED
        (asked,) = run.events("exit_requested")
        assert asked.data["source"] == f"file {leave}" and asked.data["grace_s"] <= 5


def test_a_source_that_fails_is_noted_once_and_ends_nothing(tmp_path: Path) -> None:
    leave = tmp_path / "leave"
    leave.write_text("when I like")
    with Run(tmp_path, args=("100000",), nproc=1, notices=f"file={leave}") as run:
        agent = run.start()
        failed = run.wait_event("notice_source_failed")
        assert "when I like" in failed.data["error"]
        until("the job has started", lambda: run.events("member_started"))
        run.script.with_name("enough").touch()
        assert agent.wait(60) == 0
        assert len(run.events("notice_source_failed")) == 1
