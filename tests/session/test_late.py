"""A fault is answered while a script runs the code after a block: no change is lost, and all ranks stay in one loop."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.session.launch import run_job

pytestmark = [pytest.mark.torch, pytest.mark.processes]


def run(where: Path, way: str) -> tuple[str, list[Any]]:
    """Run the job. Return the output, and the results of each of two workers."""
    where.mkdir(exist_ok=True)
    job = str(Path(__file__).with_name("late_job.py"))
    done = run_job(where, 2, job, "--way", way, "--result", "result")
    assert done.returncode == 0 and (way.endswith("calm") or (where / "struck").exists()), done.stdout
    return done.stdout, [json.loads(path.read_text()) for path in sorted(where.glob("result/*"))]


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], list[Any]]:
    """Return the results of an undisturbed run."""
    return cache(lambda way: run(tmp_path_factory.mktemp(way), way)[1])


@pytest.mark.more
@pytest.mark.parametrize(
    "way",
    ["late", pytest.param("open", marks=pytest.mark.more), pytest.param("caught", marks=pytest.mark.more)],
)
def test_what_stands_behind_a_section_behind_a_block_is_waited_for(
    tmp_path: Path, calm: Callable[[str], list[Any]], way: str
) -> None:
    output, told = run(tmp_path, way)
    assert told == calm("calm") and ", 1 fault, 0 steps lost" in output, output
    assert "was cut off" not in output, output
    # in a section, the rank is away, and all ranks start again
    assert way == "open" or "F001: replace" in output, output


@pytest.mark.more
@pytest.mark.parametrize(
    "way",
    ["break", pytest.param("kept", marks=pytest.mark.more), pytest.param("next", marks=pytest.mark.more)],
)
def test_nobody_comes_into_a_loop_that_the_others_have_left(
    tmp_path: Path, calm: Callable[[str], list[Any]], way: str
) -> None:
    output, told = run(tmp_path, way)
    assert told == calm("break-calm") and ", 1 fault, " in output, output


def test_all_start_again_when_one_that_has_left_its_loop_is_not_to_be_had(tmp_path: Path) -> None:
    """Rank 0 has left its loop, so its state belongs to a place in the script that no newcomer can reach."""
    output, told = run(tmp_path, "pause")
    assert ", 1 fault, 0 steps lost" in output and told[0] == told[1], output


@pytest.mark.parametrize("way", ["stop", pytest.param("exit", marks=pytest.mark.more)])
def test_a_rank_whose_script_has_left_its_loop_for_good_is_not_joined_by_a_newcomer(
    tmp_path: Path, way: str
) -> None:
    """A newcomer would begin a step that the others never run, and all would wait."""
    output, told = run(tmp_path, way)
    assert ", 1 fault, 0 steps lost" in output and told[0] == told[1], output
