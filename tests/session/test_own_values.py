"""The values that only one rank has: the way to its replacement, and what happens when they are too large."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast import event_log
from holdfast.exit_codes import Exit
from holdfast.session.loops.loop import without_room
from holdfast.session.loops.own_values import OwnValues
from tests.session.launch import run_job

JOB = str(Path(__file__).with_name("games_job.py"))


@pytest.mark.parametrize(
    ("large", "named", "consequence"),
    [
        ("own", "s.own is too large", "would begin without it: the next step is refused"),
        ("loader", "the data loader's state is too large", "reads the batches of that epoch again"),
    ],
)
def test_the_warning_names_the_values_that_take_the_room(large: str, named: str, consequence: str) -> None:
    warning = without_room({"own": 1, "loader": 2, "begun": 3, large: "x" * 200_000}, 200_100)
    assert warning.startswith(named) and warning.endswith(consequence)
    assert "take 200100 bytes" in warning


@pytest.mark.torch
@pytest.mark.processes
def test_values_that_a_replacement_would_not_get_are_refused(tmp_path: Path) -> None:
    """Regression: a warning, and after a kill the rank continued with ``s.own = None``."""
    done = run_job(tmp_path, 2, JOB, str(tmp_path / "result"), "large")
    assert done.returncode == Exit.BAD_INPUT, done.stdout
    assert "StateError: s.own takes more than the" in done.stdout and "positions, seeds" in done.stdout
    assert "saved step 4 (last-gasp)" in done.stdout, done.stdout


def trained(where: Path, kills: str, *more: str) -> tuple[str, list[str]]:
    """Train two ranks, and return the digest of the weights and the verdicts."""
    where.mkdir()
    done = run_job(where, 2, "--run-id", "it", JOB, str(where / "result"), kills, *more)
    assert done.returncode == 0, done.stdout
    found = event_log.read(where / "runs/it/events.jsonl").events
    return (where / "result").read_text(), [e.data["action"] for e in found if e.kind == "verdict"]


@pytest.mark.torch
@pytest.mark.processes
def test_a_process_that_is_lost_before_its_first_block_passes_the_values_on(tmp_path: Path) -> None:
    """Regression: they were on the page of the process before it only, and the next one began with ``s.own = None``."""
    undisturbed, _ = trained(tmp_path / "undisturbed", "")
    for kills, action in (("0@4.2", "restart_last_gasp"), ("1@5.2", "replace")):
        weights, verdicts = trained(tmp_path / kills, kills)
        assert action in verdicts and len(list((tmp_path / kills).glob("result.*.*"))) == 2, verdicts
        assert weights == undisturbed


@pytest.mark.torch
@pytest.mark.processes
@pytest.mark.parametrize(
    ("form", "kills", "action"),
    [("epochs", "0@4.1", "restart_last_gasp"), ("rows", "1@4.1", "replace_from_memory")],
)
def test_the_values_outlive_the_begin_of_an_epoch(tmp_path: Path, form: str, kills: str, action: str) -> None:
    """Regression: the rank-local values of a new loop were without them until its first block."""
    undisturbed, _ = trained(tmp_path / "undisturbed", "", form)
    weights, verdicts = trained(tmp_path / "killed", kills, form)
    assert action in verdicts and weights == undisturbed, verdicts


@pytest.mark.torch
@pytest.mark.processes
def test_a_variable_that_begins_again_at_the_begin_of_an_epoch_is_refused(tmp_path: Path) -> None:
    """Regression: the copy in memory had no values of the epoch before, and the job ended with other weights."""
    done = run_job(tmp_path, 2, JOB, str(tmp_path / "result"), "1@4.1", "variable")
    assert done.returncode == Exit.BAD_INPUT, done.stdout
    assert "StepError: the updates depend on number = 2, as at the first step of the job" in done.stdout


@pytest.mark.more
@pytest.mark.torch
@pytest.mark.processes
def test_a_barrier_before_the_block_is_not_passed_alone(tmp_path: Path) -> None:
    """Regression: a newcomer passed it alone, and the survivor, which was opening its loop, waited there for ever."""
    undisturbed, _ = trained(tmp_path / "undisturbed", "")
    weights, verdicts = trained(tmp_path / "late", "0@4.2", "late")
    # The second kill, that of a process before its first block, may come when no rank holds the state yet.
    assert weights == undisturbed and verdicts[-1].startswith("restart_"), verdicts


@pytest.mark.parametrize("late", [False, True])
def test_a_value_that_is_set_after_the_vote_is_told_once(
    caplog: pytest.LogCaptureFixture, late: bool
) -> None:
    """Regression: without a word, a rank that was lost after its update began with the value of the step before."""
    mine = OwnValues()
    for step in range(3):
        if not late:
            mine.set([step])
        mine.at_vote()
        if late:
            mine.set([step])
        mine.warn_if_late()
    assert len([line for line in caplog.messages if "sets s.own after its update" in line]) == late
