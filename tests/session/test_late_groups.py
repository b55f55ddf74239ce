"""Process groups that a script makes or destroys after its session was opened; one rank is killed later.

A replacement makes the groups of the setup. Where it then holds other groups than the survivors, all ranks start again
at once: a retry would meet the same groups. Regression: each attempt waited 60 s for a rank that did not come.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path

import pytest

from holdfast import event_log
from tests.session.launch import run_job

pytestmark = [pytest.mark.torch, pytest.mark.processes]

AGAIN = ["replace", "restart_last_gasp"]


def run(where: Path, way: str, made: int, killed: str = "", ranks: int = 2) -> tuple[str, Mapping[str, str]]:
    """Run the job. Return the output, and the result of each rank."""
    where.mkdir(exist_ok=True)
    job = str(Path(__file__).with_name("groups_job.py"))
    done = run_job(where, ranks, job, way, str(made), *filter(None, [killed]))
    assert done.returncode == 0 and (where / "killed").exists() == bool(killed), done.stdout
    return done.stdout, {path.name: path.read_text() for path in where.glob("ended-*")}


def answers(where: Path) -> list[str]:
    """Return the decisions of the run, all for one fault. A refusal names the line that makes a group."""
    (log,) = where.glob("runs/*/events.jsonl")
    events = event_log.read(log).events
    assert len([each for each in events if each.kind == "detected"]) == 1
    reasons = [str(each.data["reason"]) for each in events if each.kind == "state_refused"]
    assert all("hold different process groups, because " in reason for reason in reasons)
    assert all("groups_job.py:" in reason or "destroys" in reason for reason in reasons)
    return [str(each.data["action"]) for each in events if each.kind == "verdict"]


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Mapping[str, str]]:
    """Return the results of an undisturbed run."""
    return cache(lambda way, made, ranks=2: run(tmp_path_factory.mktemp(way), way, made, "", ranks)[1])


@pytest.mark.parametrize("rank", [1, pytest.param(0, marks=pytest.mark.more)])
def test_a_replacement_without_a_group_of_the_others_costs_one_restart_of_all(
    tmp_path: Path, calm: Callable[..., Mapping[str, str]], rank: int
) -> None:
    output, results = run(tmp_path, "after", 3, f"{rank}:6")
    assert results == calm("after", 3) and "1 fault, 0 steps lost" in output, output
    assert answers(tmp_path) == AGAIN


@pytest.mark.parametrize("way", ["between", pytest.param("inside", marks=pytest.mark.more)])
def test_a_replacement_that_makes_the_group_on_its_way_joins_the_others(
    tmp_path: Path, calm: Callable[..., Mapping[str, str]], way: str
) -> None:
    output, results = run(tmp_path, way, 3, "1:6")
    assert results == calm(way, 3) and answers(tmp_path) == ["replace"], output


def test_a_rank_lost_where_all_make_a_group_in_their_block_costs_no_step(
    tmp_path: Path, calm: Callable[..., Mapping[str, str]]
) -> None:
    """Regression: survivors counted the attempt, so each replacement hung, and the run ended."""
    output, results = run(tmp_path, "killed-there", 6, "1:6")
    assert results == calm("inside", 6) and "1 fault, 0 steps lost" in output, output
    assert answers(tmp_path) in (["replace"], AGAIN)  # a survivor may not have begun this block


def test_groups_made_in_each_block_leave_the_job_undisturbed(
    tmp_path: Path, calm: Callable[..., Mapping[str, str]]
) -> None:
    """Regression: after a check run that had made a group, all groups connected again over stale addresses."""
    output, results = run(tmp_path, "each", 0, "1:6")
    assert results == calm("each", 0) and answers(tmp_path) == AGAIN, output


@pytest.mark.parametrize("killed", ["1:7", pytest.param("1:2", marks=pytest.mark.more)])
def test_a_group_made_after_others_were_destroyed_connects_all_ranks(
    tmp_path: Path, calm: Callable[..., Mapping[str, str]], killed: str
) -> None:
    """Regression: the survivors had counted the destroyed group, and waited in the next one for the replacement."""
    output, results = run(tmp_path, "ended", 1, killed)
    assert results == calm("ended", 1) and "1 fault, 0 steps lost" in output, output
    assert answers(tmp_path) == (["replace"] if killed == "1:7" else AGAIN)


def test_a_group_that_a_process_makes_once_and_destroys_costs_one_restart_of_all(
    tmp_path: Path, calm: Callable[..., Mapping[str, str]]
) -> None:
    """Regression: the replacement made it alone, as in ignite's first metric, and the job hung."""
    output, results = run(tmp_path, "once", 3, "1:6")
    assert results == calm("once", 3) and "1 fault, 0 steps lost" in output, output
    assert answers(tmp_path) == AGAIN


@pytest.mark.more
def test_a_group_of_the_setup_that_the_others_have_destroyed_costs_one_restart_of_all(
    tmp_path: Path, calm: Callable[..., Mapping[str, str]]
) -> None:
    output, results = run(tmp_path, "setup-ended", 3, "1:6")
    assert results == calm("setup-ended", 3) and answers(tmp_path) == AGAIN, output


@pytest.mark.more
@pytest.mark.parametrize("rank", [1, 3])
def test_only_the_members_of_a_group_must_hold_it(
    tmp_path: Path, calm: Callable[..., Mapping[str, str]], rank: int
) -> None:
    output, results = run(tmp_path, "after", 3, f"{rank}:6", ranks=4)
    assert results == calm("after", 3, 4) and "1 fault, 0 steps lost" in output, output
    assert answers(tmp_path) == (AGAIN if rank == 1 else ["replace"])
