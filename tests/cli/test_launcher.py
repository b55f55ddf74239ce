"""The last lines of a run: one error line, the rank that caused it, and one next step."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.cli.screen.run_view import Watch
from holdfast.cli.start.launcher import RunLauncher
from holdfast.cli.start.run_config import Request
from holdfast.core.protocol.messages import Field
from holdfast.errors import UserError
from tests.cli.command import Run
from tests.cli.test_status import FAULT, Made, swept

__all__ = ["swept"]

pytestmark = pytest.mark.usefixtures("swept")
RAISED: dict[str, Field] = {**FAULT, "kind": "exception"}


def last_lines(
    made: Made, capsys: pytest.CaptureFixture[str], what: str, reason: str, code: int = 1
) -> list[str]:
    """Return what the launcher prints when a run ends because rank 1 raised ``what``. Rank 0 fails after it."""
    made.start(0, 1)
    made.journal.append("detected", {**RAISED, "what": what})
    made.journal.append("detected", {**RAISED, "what": "left for a restart", "rank": 0, "member_id": 1})
    made.end(code, reason)
    request = Request(made.settings, made.directory.path, frozenset({0}), (), ())
    launcher = RunLauncher(request, made.directory)
    assert launcher.close() == code
    return capsys.readouterr().err.splitlines()


def test_an_exception_of_many_lines_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    what = "ValueError: bad sample\n  in file a\n  in file b"
    error, after, log, report, then = last_lines(
        Made(tmp_path, "it"), capsys, what, f"the same exception: {what}"
    )
    assert (
        error
        == "error: run it: the training script failed: the same exception: ValueError: bad sample (rank 1)"
    )
    assert after.startswith("  after: step 40, 2 faults") and log.endswith("rank-00001.log")
    assert report.endswith("F001.txt") and then.startswith("  next: read the traceback")


def test_a_save_in_the_runs_own_directory_is_named_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], holdfast: Run
) -> None:
    """Without the name of this directory, a new run would find nothing in its own one and begin at step 0."""
    made = Made(tmp_path, "it")
    made.directory.checkpoints.mkdir()
    made.start(0, 1)
    made.journal.append("session_opened", {"step": 0, "root": "", "generation": "1.1"})
    made.journal.append("sealed", {"step": 40, "directory": "step-00000040.it"})
    made.end(75, "asked by Ctrl-C")
    RunLauncher(Request(made.settings, made.directory.path, frozenset({0}), (), ()), made.directory).close()
    said, then = capsys.readouterr().err.splitlines()
    assert "checkpoint saved" in said
    assert then.startswith(f"  next: HOLDFAST_CHECKPOINT={made.directory.checkpoints} and the same command")
    assert holdfast("status", "it").stdout.splitlines()[-1] == then.strip()


def test_a_save_elsewhere_is_gone_on_from_without_a_word(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The run's own checkpoint directory exists in every run of several nodes, so its existence must not matter."""
    made = Made(tmp_path, "it")
    made.directory.checkpoints.mkdir()
    made.start(0, 1)
    made.journal.append("session_opened", {"step": 0, "root": str(tmp_path / "ckpts"), "generation": "1.1"})
    made.journal.append("sealed", {"step": 40, "directory": "step-00000040.it"})
    made.end(75, "asked by Ctrl-C")
    RunLauncher(Request(made.settings, made.directory.path, frozenset({0}), (), ()), made.directory).close()
    assert (
        capsys.readouterr()
        .err.splitlines()[-1]
        .endswith(f"  next: start the same command: it continues at step 40 from {tmp_path / 'ckpts'}")
    )


def test_the_next_step_of_the_error_itself_is_the_only_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    what = f"UserError: {UserError('no such key:', hint='rename it')}"
    lines = last_lines(Made(tmp_path, "it"), capsys, what, what, 3)
    assert lines[0].endswith("UserError: no such key (rank 1)"), "without the colon"
    assert [line for line in lines if "next: " in line] == ["  next: rename it"]


def test_what_is_saved_is_said_whoever_wrote_it_last(tmp_path: Path) -> None:
    made = Made(tmp_path, "it")
    made.start(0, 1)
    share: dict[str, Field] = {"step": 40, "save_kind": "periodic", "duration_s": 0.25}
    for rank in range(2):
        made.journal.append("saved", {**share, "rank": rank, "error": "no room"})
    made.journal.append("saved", {**share, "rank": 1, "step": 60, "error": ""})
    made.journal.append("sealed", {"step": 60, "save_kind": "periodic", "directory": "step-00000060.it"})
    story = Watch(made.directory, made.settings).read()
    assert story.saves == ["saved step 60 (periodic) in 0.25 s"]
    assert story.warnings == ["rank 0 could not save step 40: no room"]
    made.close()


def test_the_first_proof_of_unmatched_collectives_is_a_warning(tmp_path: Path) -> None:
    """Regression: it was found by its text, so an exception of the script that names the error was one as well."""
    made = Made(tmp_path, "it")
    made.start(0, 1)
    proof = "rank 1 at step 6: UnmatchedCollectiveError: rank 1 makes all_reduce\n  next: keep what decides"
    quoted = "rank 0 at step 3: RuntimeError: caught: UnmatchedCollectiveError: all_reduce"
    verdict: dict[str, Field] = {"reason": "every box", "action": "replace", "evidence": [quoted, proof]}
    made.journal.append("verdict", {**verdict, "unmatched": [proof]})
    made.journal.append("verdict", {**verdict, "unmatched": []})
    made.journal.append("verdict", {**verdict, "unmatched": [proof], "action": "stop_bad_input"})
    story = Watch(made.directory, made.settings).read()
    assert story.warnings == [f"{proof.splitlines()[0]}; a second time in a row ends the run"]
    made.close()


def test_a_source_of_notices_that_cannot_be_asked_is_a_warning(tmp_path: Path) -> None:
    """Regression: a pod without the right to read its node trained without any word that no notice would come."""
    made = Made(tmp_path, "it")
    made.start(0, 1)
    made.journal.append("notice_source_failed", {"source": "kubernetes node", "error": "status 403"})
    made.journal.append(
        "status_not_sent", {"place": "pod train/bert-0", "error": "status 403", "given_up": True}
    )
    story = Watch(made.directory, made.settings).read()
    assert story.warnings == [
        "kubernetes node cannot be asked whether this host will leave (status 403): its last answer stands",
        "the state of this host cannot be shown at pod train/bert-0 (status 403)",
    ]
    made.close()


def test_steps_of_a_start_that_no_leader_has_in_its_log_are_a_warning(tmp_path: Path) -> None:
    made = Made(tmp_path, "it")
    made.journal.append("start_forgotten", {"node": "node0", "ranks": [0, 1], "step": 4})
    (warning,) = Watch(made.directory, made.settings).read().warnings
    assert "processes on node0 held step 4" in warning and "from its newest checkpoint" in warning
    made.close()
