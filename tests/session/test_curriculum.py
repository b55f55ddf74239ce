"""Several loops over steps: a rank that joins in one of them leaves it at the same step as the others."""

from __future__ import annotations

import logging
import shutil
import subprocess
from pathlib import Path

import pytest

from holdfast.errors import UsageError
from holdfast.exit_codes import Exit
from holdfast.session.loops.loop_bounds import Bound, LoopMembers, bound_of, counted_from_here
from tests.session.curriculum_job import PHASE_STEPS, PHASES
from tests.session.launch import run_job

JOB = str(Path(__file__).with_name("curriculum_job.py"))
STEPS = PHASES * PHASE_STEPS


def ends(where: Path) -> list[str]:
    """Return the step and the weights with which each rank ends."""
    lines = [
        line.removeprefix(f"rank {rank} ")
        for rank in range(3)
        for log in sorted(where.glob(f"runs/*/attempt-*/rank-{rank:05d}*.log"))
        for line in log.read_text().splitlines()
        if line.startswith(f"rank {rank} ends at")
    ]
    assert len(lines) == 3 and all(line.startswith(f"ends at {STEPS}:") for line in lines), lines
    return lines


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Return the ends of the undisturbed run."""
    where = tmp_path_factory.mktemp("calm")
    done = run_job(where, 3, JOB, "counted")
    assert done.returncode == 0, done.stdout
    return ends(where)


@pytest.mark.torch
@pytest.mark.processes
@pytest.mark.parametrize(
    ("kill", "flags"),
    [
        ("1:6", ()),  # in the middle of a phase
        pytest.param("0:4", (), marks=pytest.mark.more),  # in the first step of a phase
        pytest.param("2:7", (), marks=pytest.mark.more),  # in the last step of a phase
        pytest.param("1:9", ("--on-fault", "restart"), marks=pytest.mark.more),
    ],
)
def test_an_end_counted_from_where_a_process_stands(
    tmp_path: Path, calm: list[str], kill: str, flags: tuple[str, ...]
) -> None:
    done = run_job(tmp_path, 3, *flags, JOB, "counted", kill)
    assert done.returncode == 0 and (tmp_path / "struck").exists(), done.stdout
    assert ends(tmp_path) == calm, done.stdout


def assert_refused(done: subprocess.CompletedProcess[str]) -> None:
    """Check that the script was refused because it began with its second loop."""
    assert done.returncode == Exit.BAD_INPUT, done.stdout
    assert 'phase "0" stood where this script has phase "1"' in done.stdout, done.stdout


@pytest.fixture(scope="module")
def refused(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the checkpoints of a job whose ranks have all restarted and left out the phase that was over."""
    where = tmp_path_factory.mktemp("refused")
    assert_refused(run_job(where, 3, "--on-fault", "restart", JOB, "skipping", "1:6"))
    return where / "ckpt"


@pytest.mark.more
@pytest.mark.torch
@pytest.mark.processes
def test_a_newcomer_that_leaves_phases_out_is_refused_by_name(tmp_path: Path) -> None:
    assert_refused(run_job(tmp_path, 3, JOB, "skipping", "1:6"))


@pytest.mark.more
@pytest.mark.torch
@pytest.mark.processes
def test_another_run_that_leaves_phases_out_is_refused_by_name(tmp_path: Path, refused: Path) -> None:
    shutil.copytree(refused, tmp_path / "ckpt")
    assert_refused(run_job(tmp_path, 3, JOB, "skipping"))


@pytest.mark.torch
@pytest.mark.processes
def test_a_script_that_begins_with_the_first_phase_goes_on_there(tmp_path: Path, refused: Path) -> None:
    shutil.copytree(refused, tmp_path / "ckpt")
    done = run_job(tmp_path, 3, JOB, "from the first")
    assert done.returncode == 0 and "resumed at step 6" in done.stdout, done.stdout
    assert len(set(ends(tmp_path))) == 1, done.stdout


@pytest.mark.more
@pytest.mark.torch
@pytest.mark.processes
def test_ranks_that_end_their_loops_elsewhere_are_refused(tmp_path: Path) -> None:
    done = run_job(tmp_path, 3, JOB, "own")
    assert done.returncode == Exit.BAD_INPUT, done.stdout
    assert "loop 0 of the script ends at step" in done.stdout


@pytest.mark.parametrize(
    ("here", "until", "before", "bound"),
    [
        (23, 30, LoopMembers.SURVIVORS, (20, 30)),
        (23, 33, LoopMembers.SURVIVORS, (20, 30)),
        (23, 33, LoopMembers.THIS_RUN, (20, 30)),
        (30, 40, LoopMembers.THIS_RUN, (20, 30)),
        (30, 40, LoopMembers.ANOTHER_JOB, (20, 40)),  # that many more steps
        (23, 100, LoopMembers.THIS_RUN, (20, 100)),
        (23, None, LoopMembers.ANOTHER_JOB, (20, None)),
    ],
)
def test_which_end_holds(here: int, until: int | None, before: LoopMembers, bound: Bound) -> None:
    assert bound_of(1, here, until, (20, 30), before) == bound


@pytest.mark.parametrize(
    ("here", "until", "expected"),
    [
        (23, 10, False),  # unchanged
        (23, 20, False),  # the script itself has ended the loop
        (23, None, False),
        (5, 10, False),  # a break has ended the loop
        (23, 33, True),
        (20, 30, True),  # or a start with the third loop: the next loop shows which
    ],
)
def test_the_first_end_of_a_script_that_starts_again(here: int, until: int | None, expected: bool) -> None:
    assert counted_from_here(here, until, (0, 10)) == expected


@pytest.mark.parametrize("until", [30, 100])
def test_a_first_end_that_is_that_of_a_later_loop(until: int) -> None:
    with pytest.raises(UsageError, match=f"at step 10 before, and has it at step {until} here"):
        counted_from_here(23, until, (0, 10))


@pytest.mark.parametrize("before", [LoopMembers.THIS_RUN, LoopMembers.ANOTHER_JOB])
@pytest.mark.parametrize("here", [20, 30])
def test_an_end_behind_a_first_one_that_was_not_counted_after_all(before: LoopMembers, here: int) -> None:
    with pytest.raises(UsageError, match="ended at step 30 before, and would end at step 50 here"):
        bound_of(1, here, 50, (20, 30), before, counts_from_here=True)
    assert bound_of(1, 23, 50, (20, 30), before, counts_from_here=True) == (
        20,
        50,
    )  # more steps were requested
    assert bound_of(1, here, 30, (20, 30), before, counts_from_here=True) == (20, 30)


def test_an_end_that_is_another_after_a_start_is_told(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "holdfast"):
        assert bound_of(1, 23, 40, (20, 30), LoopMembers.ANOTHER_JOB) == (20, 40)  # more steps were requested
        assert not caplog.records
        assert bound_of(1, 23, 33, (20, 30), LoopMembers.ANOTHER_JOB) == (20, 33)
    assert "ended at step 30 before, and would end at step 33 here; if that is not meant" in caplog.text


@pytest.mark.parametrize("until", [60, None, 31])
def test_survivors_are_never_left_behind(until: int | None) -> None:
    with pytest.raises(UsageError, match="the other ranks are still in it"):
        bound_of(1, 23, until, (20, 30), LoopMembers.SURVIVORS)
