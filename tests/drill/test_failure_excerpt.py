"""The report of a failed drill: the end of the launcher's log and of the log of the rank that failed first."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from holdfast.cli.main import answer
from holdfast.drill import train
from holdfast.drill.exercise import Drill, Exercise
from holdfast.drill.failure_excerpt import LINES_MAX, TRACEBACK, Excerpt, failed_first, text
from holdfast.errors import ScriptError
from holdfast.event_log import Event
from holdfast.exit_codes import Exit
from tests.cli.test_status import FAULT, TIMES


def event(name: str, **data: object) -> Event:
    return Event(v=1, seq=0, t_wall=0.0, t_mono=0.0, who="", kind=name, data=data)


def test_the_end_of_a_log_begins_at_its_last_traceback(tmp_path: Path) -> None:
    log = tmp_path / "a.log"
    assert Excerpt.of(log).lines == []
    log.write_text("".join(f"line {n}\n" for n in range(100)))
    assert Excerpt.of(log).lines == [f"line {n}" for n in range(100 - LINES_MAX, 100)]
    log.write_text(f"{TRACEBACK}\n  old\nstep 3\n[rank 1] {TRACEBACK}\n  File\nValueError: new\n")
    assert Excerpt.of(log).lines == [f"[rank 1] {TRACEBACK}", "  File", "ValueError: new"]
    log.write_text("\n".join([TRACEBACK, *(f"  frame {n}" for n in range(100)), "ValueError: " + "x" * 9999]))
    long = Excerpt.of(log).lines
    assert len(long) == LINES_MAX and long[:2] == [TRACEBACK, "..."] and long[-1].startswith("ValueError: x")
    assert max(map(len, text([Excerpt.of(log)]).splitlines())) < 256


def test_who_failed_first_by_itself_since_the_last_recovery() -> None:
    def fault(kind: str, rank: int) -> Event:
        return event("detected", **{**FAULT, "kind": kind, "rank": rank})

    seats = {"generation": "1.2", "attempt": 2, "members": [1, 2]}
    started = event("generation_started", in_place=False, **seats)
    in_place = event("generation_started", in_place=True, **seats)
    recovered = event("recovered", **{**FAULT, **TIMES}, steps_lost=0)
    assert failed_first([]) is None
    assert failed_first([started, fault("signal", 0)]) is None
    assert failed_first([started, fault("exception", 0), in_place, recovered, fault("signal", 1)]) is None
    assert failed_first([started, fault("exit", 3), fault("exception", 1), fault("exception", 0)]) == (2, 1)


@pytest.mark.more
@pytest.mark.torch
@pytest.mark.processes
@pytest.mark.timeout(300)
def test_a_script_whose_newcomers_raise(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    script, file = tmp_path / "mine.py", tmp_path / "verdict.json"
    trap = "\n\nimport os\n\nif os.environ['HOLDFAST_JOIN']:\n    raise ValueError('no [shard] for a newcomer')\n"
    head, future, body = Path(train.__file__).read_text().partition("from __future__ import annotations\n")
    script.write_text(head + future + trap + body)
    flags = ["--nproc", "2", "--fault", "kill:rank=1@step=8", "--run-dir", str(tmp_path / "runs")]
    assert answer(["drill", *flags, "--json", str(file), str(script), "--steps", "24"]) == Exit.FAILED
    shown = capfd.readouterr().out
    _, failed, report = shown.partition("FAILED: the disturbed run ended with code")
    assert failed and "    ValueError: no [shard] for a newcomer" in report.splitlines(), shown
    assert "slowest recovery" not in shown, "there was none"
    launcher, rank = json.loads(file.read_text())["last_words"]
    assert launcher["path"].endswith("disturbed.log") and rank["path"].endswith("rank-00001.log")
    assert rank["lines"][0] == TRACEBACK and f"  {rank['path']}:" in report.splitlines()


@pytest.mark.torch
@pytest.mark.processes
def test_an_undisturbed_run_that_raises(tmp_path: Path) -> None:
    script = tmp_path / "bad.py"
    script.write_text("import os\nif os.environ['RANK'] == '1':\n    raise RuntimeError('no data')\n")
    drill = Drill(tmp_path / "drill", Exercise((str(script),), 2, results=False), 0, lambda *_: None)
    with pytest.raises(ScriptError, match=r"rank-00001\.log:\n    Traceback(.|\n)*RuntimeError: no data"):
        drill.undisturbed()
