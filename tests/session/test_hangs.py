"""Real processes: sections are no hangs and are run again; an endless loop is named with its stack, and replaced."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from holdfast import event_log
from tests.session.launch import run_job
from tests.session.left_job import LEFT_AT
from tests.session.left_job import STEPS as LEFT_STEPS
from tests.session.section_job import EPOCHS, LAST_STEP
from tests.session.start_job import RANKS

pytestmark = [pytest.mark.torch]

JOB = str(Path(__file__).with_name("hang_job.py"))
START = str(Path(__file__).with_name("start_job.py"))
UNSEEN = str(Path(__file__).with_name("unseen_job.py"))
AFTER = str(Path(__file__).with_name("section_job.py"))
LEFT = str(Path(__file__).with_name("left_job.py"))
SILENT = str(Path(__file__).with_name("silent_job.py"))
FLOOR_S = 0.7


@pytest.mark.processes
def test_a_section_is_run_again_and_a_loop_is_named_and_replaced(tmp_path: Path) -> None:
    done = run_job(tmp_path, 3, "--run-id", "it", "--hang-floor", str(FLOOR_S), JOB, str(tmp_path))
    assert done.returncode == 0, done.stdout
    events = event_log.read(tmp_path / "runs/it/events.jsonl").events
    detected = [e.data for e in events if e.kind == "detected" and e.data["kind"] != "exception"]
    assert [(d["rank"], d["kind"]) for d in detected] == [(1, "signal"), (2, "hang")], done.stdout
    assert all(e.data["steps_lost"] == 0 for e in events if e.kind == "recovered")
    logs = [(tmp_path / f"runs/it/attempt-{n:03d}/rank-00000.log").read_text() for n in range(2)]
    assert [log.count("before step 4") for log in logs] == [0, 1], "broken off, then run again"
    assert [log.count("before step 8") for log in logs] == [0, 1], "longer than the floor, but announced"
    assert "was cut off" not in done.stdout
    (hang,) = [e.data for e in events if e.kind == "hang"]
    assert (hang["answer"], hang["ranks"], hang["confidence"]) == ("kill", [2], "certain")
    (stack,) = [name for name in hang["stacks"] if name.endswith("rank-00002.txt")]
    assert "in spin" in (tmp_path / "runs/it" / stack).read_text()
    assert any("rank 2" in line and "at spin (hang_job.py" in line for line in hang["evidence"])


@pytest.mark.more
@pytest.mark.processes
def test_who_alone_has_left_the_loop_is_named_and_replaced(tmp_path: Path) -> None:
    done = run_job(tmp_path, 3, "--run-id", "it", "--hang-floor", "0.3", LEFT)
    assert done.returncode == 0, done.stdout
    (detected,) = [
        e.data for e in event_log.read(tmp_path / "runs/it/events.jsonl").events if e.kind == "detected"
    ]
    assert (detected["rank"], detected["kind"], detected["step"]) == (1, "hang", LEFT_AT + 1), done.stdout
    assert f"(step {LEFT_STEPS}, 1 fault, 0 steps lost" in done.stdout


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the digest of the weights of an undisturbed run."""
    place = tmp_path_factory.mktemp("undisturbed")
    done = run_job(place, RANKS, START, str(place), "none")
    assert done.returncode == 0, done.stdout
    return (place / "rank-0.digest").read_text()


@pytest.mark.processes
@pytest.mark.parametrize(
    ("kind", "faults", "why"),
    [
        pytest.param(
            "worker stops", [(1, "hang", 2)], "its process is stopped (state T)", marks=pytest.mark.more
        ),
        pytest.param(
            "newcomer stops",
            [(1, "signal", 2), (1, "hang", 4)],
            "its process is stopped (state T)",
            marks=pytest.mark.more,
        ),
        pytest.param(
            "newcomer loops",
            [(1, "signal", 2), (1, "hang", 4)],
            "its start has made no progress",
            marks=pytest.mark.more,
        ),
        pytest.param("loader stops", [(1, "hang", 2)], "its data loader process", marks=pytest.mark.more),
    ],
)
def test_a_process_that_hangs_before_its_first_step_is_replaced(
    tmp_path: Path, undisturbed: str, kind: str, faults: list[tuple[int, str, int]], why: str
) -> None:
    done = run_job(
        tmp_path, RANKS, "--run-id", "it", "--hang-floor", str(FLOOR_S), START, str(tmp_path), kind
    )
    assert done.returncode == 0, done.stdout
    events = event_log.read(tmp_path / "runs/it/events.jsonl").events
    detected = [e.data for e in events if e.kind == "detected"]
    assert [(d["rank"], d["kind"], d["member_id"]) for d in detected] == faults
    (hang,) = [e.data for e in events if e.kind == "hang"]
    assert why in str(hang["reason"]) and any("rank 1" in line for line in hang["evidence"])
    assert {e.data["steps_lost"] for e in events if e.kind == "recovered"} == {0}
    assert {path.read_text() for path in tmp_path.glob("rank-*.digest")} == {undisturbed}
    assert not re.search(r"F\d+: ,", done.stdout), "each line says what was done"


@pytest.mark.more
@pytest.mark.processes
def test_who_does_not_answer_is_looked_at_before_its_kill(tmp_path: Path) -> None:
    done = run_job(tmp_path, 3, "--run-id", "it", SILENT, str(tmp_path))
    assert done.returncode == 0, done.stdout
    run = tmp_path / "runs/it"
    events = event_log.read(run / "events.jsonl").events
    detected = [e.data for e in events if e.kind == "detected"]
    assert [(d["rank"], d["kind"]) for d in detected] == [(1, "signal"), (0, "silent")], done.stdout
    (hang,) = [e.data for e in events if e.kind == "hang"]
    assert (hang["ranks"], hang["reason"]) == ([0], detected[1]["what"])
    report = json.loads((run / "faults/F002.json").read_text())
    (stack,) = report["stacks"]
    assert "in stuck" in Path(stack).read_text()
    assert any("rank 0" in line and "process R" in line and "stuck" in line for line in report["evidence"])
    assert any(stack in line for line in report["next_steps"])


@pytest.mark.processes
def test_a_section_that_is_not_run_again_is_told_once(tmp_path: Path) -> None:
    done = run_job(tmp_path, 2, AFTER, str(tmp_path))
    assert done.returncode == 0, done.stdout
    told = f'section "eval" after step {LAST_STEP} was cut off and is not run again'
    assert done.stdout.count(told) == 1, done.stdout
    assert done.stdout.count("evaluated after step") == EPOCHS - 1, "one of them was cut off"


@pytest.mark.more
@pytest.mark.processes
def test_a_worker_that_stops_before_any_agent_has_seen_a_step_is_found(tmp_path: Path) -> None:
    done = run_job(tmp_path, 3, "--run-id", "it", UNSEEN, str(tmp_path))
    assert done.returncode == 0, done.stdout
    events = event_log.read(tmp_path / "runs/it/events.jsonl").events
    assert sum(e.kind == "agent_started" for e in events) == 2
    assert [(e.data["rank"], e.data["kind"]) for e in events if e.kind == "detected"] == [(1, "hang")]
    assert [e.data["steps_lost"] for e in events if e.kind == "recovered"] == [0]
