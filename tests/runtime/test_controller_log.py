"""The parts that a controller reads of a log that may be months long, and the clock of their times."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from holdfast import event_log
from holdfast.core.job.log_replay import SNAPSHOT, ReplayedState
from holdfast.core.protocol.messages import Field, Mirror
from holdfast.event_log import Event, EventLog, Said
from holdfast.runtime.agent.leader_election import last_line
from holdfast.runtime.controller import controllerd
from holdfast.runtime.controller.controllerd import ControllerDaemon, ControllerLog, in_time_of
from holdfast.runtime.node.run_settings import RunSettings
from tests.runtime.runs import Run

VERDICT: dict[str, Field] = {
    "action": "replace", "step": 5, "digests": [], "failed_steps": [], "occurrences": [], "counts": True,
    "reason": "", "evidence": [], "memory_step": -1,
}  # fmt: skip


@pytest.mark.parametrize("block", [64, 300, 1 << 20])
def test_a_log_is_read_from_its_newest_sound_snapshot_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: int
) -> None:
    monkeypatch.setattr(event_log, "_BLOCK_SIZE_BYTES", block)
    path = tmp_path / "events.jsonl"
    assert list(event_log.read_since(path, "mark")) == []
    log = EventLog.open(path, "a")
    for number in range(40):
        log.append("mark" if number in (7, 20, 33) else "tick", {"number": number, "text": '"kind":"mark"'})
    log.close()
    assert [e.data["number"] for e in event_log.read_since(path, "mark")] == list(range(33, 40))
    assert [e.data["number"] for e in event_log.read_since(path, "none")] == list(range(40))
    data = path.read_bytes()
    at = data.rindex(b'"kind":"mark"')
    path.write_bytes(data[: at + 9] + b"q" + data[at + 10 :])
    assert next(iter(event_log.read_since(path, "mark"))).data["number"] == 20, "that one is damaged"


def test_a_successor_reads_from_the_newest_snapshot_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: after four million lines, no controller could be replaced."""
    monkeypatch.setattr(controllerd, "SNAPSHOT_LINES", 10)
    run = Run(tmp_path).dir
    shown: list[Mirror] = []
    log = ControllerLog.open(run.journal, "controller")
    log.begin(ReplayedState(), 0, 1, shown.append)
    answered_s = time.monotonic()
    log.append("verdict", {**VERDICT, "at_s": answered_s})
    for number in range(24):
        log.append("planned", {"step": number})
    log.close()
    events = event_log.read(run.journal).events
    assert [e.kind for e in events].count(SNAPSHOT) == 2 and len(events) == len(shown) == 27
    assert last_line(run) == (1, 27)

    successor = ControllerDaemon.__new__(ControllerDaemon)
    successor._run, successor._term, successor._lines, successor._alone = run, 2, [], False
    successor._settings = RunSettings.load(run.path)
    log, past = successor._open_log()
    log.close()
    assert past.step == 23 and [a.step for a in past.answered] == [5]
    assert past.answered[0].at_s == pytest.approx(answered_s, abs=5.0), "on this machine's clock"
    assert len(successor._lines) == 7, "the snapshot, and what follows"


def test_a_leader_does_not_read_what_a_deposed_controller_and_one_that_was_alone_have_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Node 0 has led in term 1 and lost its cable. Another node has led in term 2 and had the first line of term 1."""
    monkeypatch.setattr(controllerd, "SNAPSHOT_LINES", 3)
    run = Run(tmp_path, nnodes=2, nnodes_max=2).dir

    def opened(term: int, alone: bool = False) -> tuple[ControllerLog, ReplayedState, list[Mirror]]:
        daemon = ControllerDaemon.__new__(ControllerDaemon)
        daemon._run, daemon._term, daemon._lines, daemon._alone = run, term, [], alone
        daemon._settings, daemon._mirrors, daemon._driver = RunSettings.load(run.path), set(), None
        return *daemon._open_log(), daemon._lines

    log, _, _ = opened(1)
    log.append("planned", {"step": 4})
    log.append("exit_agreed", {"step": 7})
    log.append("planned", {"step": 7})  # a snapshot follows
    log.close()
    assert [e.data["after"] for e in event_log.read(run.journal).events if "after" in e.data] == ["0.0"]
    log, past, _ = opened(1, alone=True)
    assert past.agreed_step == 7 and past.step == 7
    log.append("planned", {"step": 8})
    log.close()
    mirror = EventLog.open(run.journal, "controller")
    mirror.append("controller_started", {"term": 2, "line": "2.1", "after": "1.1"})
    mirror.append("planned", {"step": 5, "line": "2.2"})
    mirror.close()
    log, past, lines = opened(3)
    assert past.agreed_step is None and past.step == 5
    assert [(m.term, m.number) for m in lines] == [(1, 1), (2, 1), (2, 2)], "other nodes get no void line"
    log.append("controller_started", {"term": 3})
    log.close()
    assert [e.data["after"] for e in event_log.read(run.journal).events if "after" in e.data][-1] == "2.2"


def test_a_step_of_the_wall_clock_moves_no_fault() -> None:
    """Regression: an NTP step between two controllers moved all faults out of the budget's window, or into it."""
    event = Event(1, 1, *Said(1_000_000.0, 500.0), "controller", "verdict", {})
    for wall_s in (1_000_060.0, 900_000.0, 2_000_000.0):
        assert in_time_of(event, wall_s, 560.0) == 500.0
    assert in_time_of(event, 1_000_060.0, 10.0) == -50.0, "the machine was started again"
