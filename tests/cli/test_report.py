"""Fault reports and stacks: one screen per fault of every kind, which can be checked against the log."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from holdfast.cli.screen.fault_report import FaultReport, reports_of, text, write
from holdfast.cli.screen.run_view import Watch
from holdfast.core.protocol.messages import Field
from holdfast.event_log import read
from holdfast.exit_codes import Exit
from holdfast.runtime.node.rundir import log_path
from holdfast.runtime.node.stack_texts import whole_words
from tests.cli.command import Run
from tests.cli.test_run import script, start
from tests.cli.test_status import FAULT, TIMES, Made, swept

__all__ = ["script", "swept"]  # the training script of test_run

pytestmark = pytest.mark.usefixtures("swept")

SCREEN_LINES = 45
HANG: dict[str, Field] = {
    "answer": "kill",
    "ranks": [1],
    "confidence": "certain",
    "reason": "it is in forward of step 20, the other got to backward of step 20",
    "evidence": ["rank 0: backward of step 20", "rank 1: forward of step 20, at spin (train.py:3)"],
    "stacks": ["evidence/H001/rank-00000.txt", "evidence/H001/rank-00001.txt"],
}

CORRUPTED: dict[str, Field] = {
    "ranks": [1],
    "nodes": ["node0"],
    "certain": True,
    "step": 20,
    "evidence": ["body.weight[0:4]: rank 1 against 3 of 4 ranks that hold it"],
}


def faulty(
    base: Path,
    kind: str,
    what: str,
    *,
    signal: int | None = 9,
    code: int | None = None,
    recovered: bool = True,
    session: bool = True,
    phase: str = "forward",
) -> list[FaultReport]:
    """Make a run with one fault, and return its reports."""
    made = Made(base, "it")
    made.start(0, 1)
    if session:
        made.journal.append("session_opened", {"step": 0, "root": "", "generation": "1.1"})
    if kind == "hang":
        made.journal.append("stalled", {"idle_s": 1.6, "bound_s": 1.5, "step_s": 0.1})
        made.journal.append("hang", HANG)
    if kind == "corruption":
        for step in (8, 20, 20):  # a step that is done again counts once
            made.journal.append("corrupted", {**CORRUPTED, "step": step})
    member: dict[str, Field] = {"rank": 1, "member_id": 2}
    made.journal.append(
        "member_exited",
        {**member, "code": code, "signal": signal, "state": "compute", "step": 20, "phase": phase},
    )
    made.journal.append(
        "detected", {**member, "kind": kind, "what": what, "step": 20, "phase": phase, "detected_s": 0.01}
    )
    other: dict[str, Field] = {"rank": 0, "member_id": 1, "state": "compute", "step": 20, "phase": "vote"}
    made.journal.append("member_exited", {**other, "code": 78, "signal": None})
    made.journal.append("settled", {"rank": 0, "state": "aborted", "step": 20, "generation": "1.2"})
    made.journal.append(
        "planned", {"step": 20, "in_doubt": 1, "decision": "back", "evidence": ["dead rank 1 is COMPUTE(20)"]}
    )
    made.journal.append("verdict", {"action": "restart_last_gasp", "reason": "every box", "evidence": []})
    if recovered:
        made.journal.append("sealed", {"step": 20, "directory": "step-00000020.it"})
        made.journal.append("recovered", {**member, **TIMES, "kind": kind, "step": 20, "steps_lost": 0})
    else:
        made.journal.append("run_ended", {"code": 1, "cause": "FAILED", "reason": "over", "step": 20})
    return reports_of(made.directory, made.settings, read(made.directory.journal).events)


@pytest.mark.parametrize(
    ("kind", "what", "words"),
    [
        (
            "hang",
            "hangs: it is in forward",
            ("hang (certain)", "at spin (train.py:3)", "H001", "--hang-factor"),
        ),
        ("hang", "hangs: its process is stopped", ("kill -STOP",)),
        (
            "corruption",
            "holds a wrong copy of the state",
            (
                "corruption (certain)",
                "against 3 of 4",
                "silent corruption 2 times on node0",
                "--verify-every",
            ),
        ),
        ("signal", "was killed by signal 9", ("signal 9", "dmesg", "holdfast logs")),
        ("collective", "a collective broke", ("network",)),
        ("exception", "ValueError: no", ("holdfast logs",)),
    ],
)
def test_one_screen_says_who_why_and_what_next(
    tmp_path: Path, kind: str, what: str, words: tuple[str, ...]
) -> None:
    (report,) = faulty(tmp_path, kind, what)
    shown = text(report)
    for word in (*words, what, "rank 1", "forward of step 20", "dead rank 1 is COMPUTE(20)", "0 steps lost"):
        assert word in shown
    assert len(shown.splitlines()) <= SCREEN_LINES
    assert report.recovered and report.lost_s == TIMES["resumed_s"] and report.in_doubt == 1
    assert (
        "ranks that had not received the last vote ran the step again" in shown
        and "step-00000020.it" in shown
    )
    assert [t.phase for t in report.timeline][-1] == "resumed" and sum(
        t.took_s for t in report.timeline
    ) == 2.25


def test_the_end_of_another_rank_is_not_evidence(tmp_path: Path) -> None:
    """Ranks whose processes the recovery cannot use exit for a restart. Their exits belong to the same recovery."""
    (report,) = faulty(tmp_path, "signal", "was killed by signal 9")
    assert "its process ended with signal 9" in report.evidence[0]
    assert not [line for line in report.evidence if "78" in line] and "dmesg" in report.next_steps[0]


def test_a_process_that_left_for_a_restart(tmp_path: Path) -> None:
    (report,) = faulty(tmp_path, "exit", "left for a restart", signal=None, code=78)
    assert "its process left for a restart" in report.evidence[0] and "code 78" not in text(report)


def test_a_script_without_a_session(tmp_path: Path) -> None:
    (report,) = faulty(tmp_path, "signal", "was killed by signal 9", session=False)
    assert "all workers were started again after 2.25 s" in text(report)
    assert "without training" not in text(report) and "steps lost" not in text(report)


def test_long_lines_end_after_a_word() -> None:
    assert whole_words("as it is", 8) == "as it is"
    assert whole_words("at spin (train.py:3), called from main", 30) == "at spin (train.py:3),..."


def test_what_takes_longer_than_usual_is_marked(tmp_path: Path) -> None:
    (report,) = faulty(tmp_path, "signal", "was killed by signal 9")
    assert {t.phase for t in report.timeline if t.late} == set()
    slow = [t for t in text(report).splitlines() if "late" in t]
    assert slow == []
    (hang,) = faulty(tmp_path / "b", "hang", "hangs: x")
    assert next(t.usual_s for t in hang.timeline if t.phase == "detected") == 2.0, (
        "its bound and half a second"
    )


@pytest.mark.parametrize(("start_s", "spares"), [(18.6, 0), (18.6, 1), (0.6, 0)])
def test_a_replacement_with_a_slow_start_is_told_with_its_remedy(
    tmp_path: Path, start_s: float, spares: int
) -> None:
    made = Made(tmp_path, "it")
    made.start(0, 1)
    member: dict[str, Field] = {"rank": 1, "member_id": 2}
    made.journal.append(
        "detected",
        {**member, "kind": "signal", "what": "was killed", "step": 8, "phase": "vote", "detected_s": 0.01},
    )
    newcomer: dict[str, Field] = {"rank": 1, "member_id": 3}
    made.journal.append("member_started", {**newcomer, "pid": 1})
    made.journal.append("joined", {**newcomer, "step": 8, "generation": "1.2"})
    made.journal.append("recovered", {**member, **TIMES, "kind": "signal", "step": 8, "steps_lost": 0})
    events = [
        msgspec.structs.replace(e, t_mono=start_s if e.kind == "joined" else 0.0)
        for e in read(made.directory.journal).events
    ]
    (report,) = reports_of(made.directory, msgspec.structs.replace(made.settings, spares=spares), events)
    said = [line for line in report.next_steps if "from its start to its join" in line]
    assert bool(said) == (start_s > 2)
    assert all("18.6 s" in line and "--preload" in line for line in said)
    assert all(("--spares 1" in line) == (spares == 0) for line in said)


def test_a_run_that_ended_with_the_fault(tmp_path: Path) -> None:
    (report,) = faulty(tmp_path, "exception", "ValueError: no", signal=None, recovered=False)
    assert not report.recovered and report.ended == "FAILED: over"
    assert "until the run ended" in text(report)


def test_a_run_that_its_agent_ended_alone(tmp_path: Path) -> None:
    """No controller could be kept, so the log has no ``run_ended``: status and report both say that it is over."""
    made = Made(tmp_path, "it")
    made.start(0, 1)
    made.journal.append("session_opened", {"step": 0, "root": "", "generation": "1.1"})
    made.journal.append("detected", FAULT)
    made.journal.append("agent_ended", {"code": int(Exit.INTERNAL), "step": 20})
    (report,) = reports_of(made.directory, made.settings, read(made.directory.journal).events)
    assert Watch(made.directory, made.settings).poll().reason == "no controller could be kept"
    assert report.ended == "INTERNAL: no controller could be kept"
    assert "until the run ended" in text(report)


def test_reports_are_private_files(tmp_path: Path) -> None:
    (report,) = faulty(tmp_path, "hang", "hangs: x")
    run = Made(tmp_path, "other").directory
    path = write(run, report)
    assert path.read_text() == text(report) and path.stat().st_mode & 0o777 == 0o600
    assert json.loads(path.with_suffix(".json").read_text())["rank"] == 1
    assert path.parent.stat().st_mode & 0o777 == 0o700


def test_the_command(tmp_path: Path, holdfast: Run) -> None:
    (report,) = faulty(tmp_path, "hang", "hangs: x")
    assert holdfast("report", "it").stdout == text(report)
    assert holdfast("report", "--fault", "1").stdout == text(report)
    assert json.loads(holdfast("report", "--json").stdout)[0]["stacks"] == report.stacks
    wrong = holdfast("report", "--fault", "7")
    assert wrong.returncode == 2 and "no fault 7: it had one" in wrong.stderr
    faulty(tmp_path / "b", "exception", "ValueError: no", signal=None, recovered=False)
    over = holdfast("report", "--run-dir", "b/runs").stdout
    assert over.endswith("ended with 1: the training script failed: over\n")
    calm = Made(tmp_path, "calm")
    calm.start(0, 1)
    assert holdfast("report", "calm").stdout == "run calm had no fault\n"
    calm.end(75, "asked to exit (launcher lost): step 40 is saved")
    assert "ended with 75: graceful exit" in holdfast("report", "calm").stdout
    assert "why  asked to exit (launcher lost): step 40 is saved" in holdfast("status", "calm").stdout
    Made(tmp_path, "never-started")
    gone = holdfast("stacks", "never-started")
    assert gone.returncode == 2 and "no living worker" in gone.stderr


@pytest.mark.processes
def test_stacks_of_a_living_run(tmp_path: Path, holdfast: Run) -> None:
    process = start(tmp_path)
    try:
        found = json.loads(holdfast("stacks", "mine", "--json").stdout)
        assert [each["rank"] for each in found] == [0, 1]
        assert all("train.py" in each["stacks"] and each["process"] for each in found)
        assert "rank 1, pid" in holdfast("stacks", "mine", "--rank", "1").stdout
    finally:
        process.terminate()
        process.communicate(timeout=60)


@pytest.mark.parametrize("words", ["last words\n", ""])
def test_the_output_of_a_fault_is_not_that_of_its_successor(tmp_path: Path, words: str) -> None:
    """A newcomer writes into the log of the lost rank, and reports are made again after that."""
    made = Made(tmp_path, "it")
    made.start(0, 1)
    made.journal.append("member_exited", {"member_id": 2, "rank": 1, "code": None, "signal": 6, "state": "compute",
                                          "step": 20, "phase": "forward", "log_size_bytes": len(words)})  # fmt: skip
    log_path(made.directory.path, 0, 1).write_text(words + 100 * "joined\n")
    made.journal.append("detected", {**FAULT, "what": "was killed by signal 6 (SIGABRT)"})
    (report,) = reports_of(made.directory, made.settings, read(made.directory.journal).events)
    assert report.log_tail == words.splitlines() and "called abort()" in report.next_steps[0]


def test_whoever_joins_after_the_plan_did_not_come_to_rest(tmp_path: Path) -> None:
    made = Made(tmp_path, "it")
    made.start(0, 1)
    made.journal.append("detected", {**FAULT, "what": "was killed by signal 9 (SIGKILL)"})
    settled: dict[str, Field] = {"state": "ready", "step": 20, "generation": "1.2"}
    made.journal.append("settled", {**settled, "rank": 0})
    made.journal.append("planned", {"step": 20, "in_doubt": 0, "decision": "none", "evidence": []})
    made.journal.append("settled", {**settled, "rank": 1})
    (report,) = reports_of(made.directory, made.settings, read(made.directory.journal).events)
    assert "rank 0 came to rest: ready at step 20" in report.evidence


def test_a_script_that_ends_before_the_others(tmp_path: Path) -> None:
    (report,) = faulty(tmp_path, "exit", "ended with code 0", signal=None, code=0, phase="left")
    assert report.where == "after its script had ended, at step 20"
    assert "end before the others" in report.next_steps[0]


def test_a_collective_that_broke_because_a_node_was_lost(tmp_path: Path) -> None:
    made = Made(tmp_path, "it")
    made.start(0, 1)
    broke: dict[str, Field] = {**FAULT, "rank": 0, "member_id": 1, "kind": "collective", "phase": ""}
    made.journal.append("detected", {**broke, "what": "all_reduce: reset by peer"})
    made.journal.append("member_exited", {"member_id": 2, "rank": 1, "code": None, "signal": None, "state": "starting",
                                          "step": 1, "phase": "no page", "log_size_bytes": 0})  # fmt: skip
    made.journal.append(
        "detected", {**FAULT, "kind": "silent", "what": "went with its node", "phase": "no page"}
    )
    first, second = reports_of(made.directory, made.settings, read(made.directory.journal).events)
    assert first.next_steps == [
        "nothing here: it broke because of rank 1 (went with its node), which has a report of its own"
    ]
    assert "what became of node0?" in second.next_steps[0] and "not known" in second.where
    assert second.evidence[0] == "its process is gone"
