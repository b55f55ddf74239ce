"""Reports of a drill: the events of each fault become one report."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from holdfast.drill.corpus import load, sources
from holdfast.drill.inject import Injected, read_injected
from holdfast.drill.timeline import decisions, fault_reports
from holdfast.drill.trace import Trace, read_trace
from holdfast.errors import UserError
from holdfast.event_log import Event

PHASES = ("detected", "fenced", "quiesced", "planned", "restored", "resumed")


def event(seq: int, at_s: float, kind: str, **data: Any) -> Event:
    return Event(1, seq, 0.0, at_s, "controller", kind, data)


def recovery(start_s: float, step: int, *, decision: str = "none", in_doubt: int = 0) -> list[Event]:
    """Return the events of the six phases, at 0.1, 0.2, ... seconds after ``start_s``."""
    made = []
    for index, kind in enumerate(PHASES):
        data: dict[str, Any] = {}
        if kind == "planned":
            data = {"step": step, "decision": decision, "in_doubt": in_doubt}
        made.append(event(index, start_s + 0.1 * (index + 1), kind, **data))
    made.append(event(9, start_s + 0.6, "recovered", steps_lost=0))
    return made


def injected(number: int, at_s: float, step: int, committed: int) -> Injected:
    return Injected(
        number, "kill", (1,), (5,), "vote", "vote", step, committed, int(at_s * 1e9), int((at_s + 0.05) * 1e9)
    )


def test_each_fault_gets_the_phases_between_it_and_the_next() -> None:
    faults = [injected(0, 100.0, 7, 7), injected(1, 200.0, 9, 9)]
    events = recovery(100.0, 7) + recovery(200.0, 10, decision="forward", in_doubt=2)
    first, second = fault_reports(faults, events)
    assert [first.seconds(phase) for phase in PHASES] == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.5, 0.6])
    assert (first.decision, first.steps_lost, first.freed_s) == ("none", 0, 0.05)
    assert (second.decision, second.in_doubt, second.step) == ("forward", 2, 9)
    assert decisions(events) == {"forward": 1, "back": 0}


def test_a_step_that_a_page_proved_and_the_plan_forgot_is_lost() -> None:
    (report,) = fault_reports([injected(0, 100.0, 7, 7)], recovery(100.0, 5))
    assert report.steps_lost == 2


def test_a_recovery_that_began_again_counts_to_its_end() -> None:
    events = recovery(100.0, 7)[:4] + recovery(101.0, 7)
    (report,) = fault_reports([injected(0, 100.0, 7, 7)], events)
    assert report.detected_s == pytest.approx(0.1)
    assert report.planned_s == pytest.approx(0.4), "as in the report of the run"
    assert report.resumed_s == pytest.approx(1.6)


def test_a_recovery_that_never_ended_says_so() -> None:
    (report,) = fault_reports([injected(0, 100.0, 7, 7)], recovery(100.0, 7)[:3])
    assert report.quiesced_s is not None and report.planned_s is None and report.resumed_s is None


def test_a_torn_line_of_the_injector_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "injected.jsonl"
    assert read_injected(path) == []
    path.write_bytes(b'{"number":0,"kind":"kill","ranks":[1],"members":[5],"asked_phase":"vote","phase":"vote",'
                     b'"step":7,"committed_step":7,"moment_ns":100000000000,"freed_ns":100050000000}\n'
                     b'{"number":1,')  # fmt: skip
    assert read_injected(path) == [injected(0, 100.0, 7, 7)]


def test_the_corpus_is_the_same_every_time_and_skips_what_was_installed(tmp_path: Path) -> None:
    for name in ("b.py", "a.py", "a/z.py", "site-packages/other.py", "test/t.py", "notes.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    assert [path.relative_to(tmp_path).as_posix() for path in sources(tmp_path)] == ["a/z.py", "a.py", "b.py"]
    assert load(7, tmp_path).tobytes() == b"a/z.pya"
    with pytest.raises(UserError, match="needs 1000"):
        load(1000, tmp_path)
    assert load(1 << 16).tobytes() == load(1 << 16).tobytes()


def test_a_trace_leaves_out_a_torn_line(tmp_path: Path) -> None:
    trace = Trace(tmp_path, lambda: 3)
    trace.committed(1)
    trace.committed(2)
    trace.close()
    path = tmp_path / "rank-00003.trace"
    with path.open("a") as file:
        file.write("3 12")
    assert [step for step, _ in read_trace(path)] == [1, 2]
