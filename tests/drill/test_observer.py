"""A run observed from outside: what its event log tells."""

from __future__ import annotations

from pathlib import Path

from holdfast.drill.observer import ObservedRun
from holdfast.drill.runner import Outcome
from holdfast.event_log import EventLog


def test_a_run_has_ended_although_its_agent_has_the_last_line(tmp_path: Path) -> None:
    log = EventLog.open(tmp_path / "events.jsonl", "controller")
    run = ObservedRun(tmp_path)
    run.poll()
    assert not run.ended
    log.append("run_ended", {"code": 0, "cause": "OK", "reason": "", "step": 7})
    log.append("agent_ended", {"code": 0, "step": 7})
    log.close()
    run.poll()
    assert run.ended


def test_an_agent_ends_a_run_without_a_step(tmp_path: Path) -> None:
    """It was asked to leave when there was no controller."""
    log = EventLog.open(tmp_path / "events.jsonl", "agent")
    log.append("session_opened", {"step": 3, "root": "/ckpt", "generation": "1.1"})
    log.append("run_ended", {"code": 76, "cause": "UNSAVED", "reason": "asked to leave"})
    log.append("agent_ended", {"code": 76, "step": 5})
    log.close()
    outcome = Outcome.read(tmp_path, 76, 1.0, stalled=True)
    assert (outcome.step, outcome.root) == (5, "/ckpt")
