"""The code between two loops over steps is run once by the job, whichever process runs the script again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.session.epoch_job import EPOCH_STEPS, EPOCHS, RANKS
from tests.session.launch import run_job

pytestmark = [pytest.mark.torch, pytest.mark.processes]

JOB = str(Path(__file__).with_name("epoch_job.py"))
Calm = Callable[[str], list[str]]


def ends(where: Path, *arguments: str) -> tuple[list[str], str]:
    """Run the job. Return step, weights and history with which each rank ends, and the output."""
    where.mkdir(exist_ok=True)
    done = run_job(where, RANKS, *arguments)
    assert done.returncode == 0, done.stdout
    logs = sorted(where.glob("runs/*/attempt-*/rank-*.log"))
    lines = [line for log in logs for line in log.read_text().splitlines() if " ends at " in line]
    assert len(lines) == RANKS and all(f"ends at {EPOCHS * EPOCH_STEPS}:" in line for line in lines), (
        done.stdout
    )
    return sorted(lines), done.stdout


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Calm:
    """Return the undisturbed run of a way, started once."""
    known: dict[str, list[str]] = {}

    def told(way: str) -> list[str]:
        if way not in known:
            known[way], _ = ends(tmp_path_factory.mktemp("calm"), JOB, way)
        return known[way]

    return told


@pytest.mark.parametrize(
    ("kill", "flags"),
    [
        ("1:7", ()),
        pytest.param("0:6", (), marks=pytest.mark.more),
        pytest.param("2:8", ("--on-fault", "restart"), marks=pytest.mark.more),
    ],
)
def test_a_scheduler_steps_once_after_each_epoch(
    tmp_path: Path, calm: Calm, kill: str, flags: tuple[str, ...]
) -> None:
    told, output = ends(tmp_path / "job", *flags, JOB, "stepping", kill)
    assert told == calm("stepping"), output
    assert "1 fault," in output, output


@pytest.mark.parametrize(
    ("way", "kill", "flags"),
    [
        ("stepping", "1:6:changed", ()),
        pytest.param("before", "0:6:changed", (), marks=pytest.mark.more),
        pytest.param("before", "1:6", ("--on-fault", "restart"), marks=pytest.mark.more),  # in the next block
    ],
)
def test_a_schedule_that_went_on_before_all_start_again_goes_on_once(
    tmp_path: Path, calm: Calm, way: str, kill: str, flags: tuple[str, ...]
) -> None:
    told, output = ends(tmp_path / "job", *flags, JOB, way, kill)
    assert told == calm(way), output
    assert "restart last gasp" in output and "1 fault," in output, output


@pytest.mark.more
def test_a_newcomer_gets_the_schedule_from_before_the_code_that_moves_it(tmp_path: Path, calm: Calm) -> None:
    """The newcomer runs this code. With the schedule from after it, it would move the schedule again."""
    told, output = ends(tmp_path / "job", JOB, "apart", "0:6:changed")
    assert told == calm("apart"), output
    assert "F001: replace" in output and "1 fault," in output, output


@pytest.mark.more
@pytest.mark.parametrize("kill", ["1:7", pytest.param("0:6", marks=pytest.mark.more)])
def test_a_newcomer_does_not_come_to_the_validations_of_epochs_that_are_done(
    tmp_path: Path, calm: Calm, kill: str
) -> None:
    told, output = ends(tmp_path / "job", JOB, "plateau", kill)
    assert told == calm("plateau"), output
    assert "F001: replace" in output and "1 fault," in output, output


@pytest.mark.parametrize("kill", ["0:6", pytest.param("1:6", marks=pytest.mark.more)])
def test_a_newcomer_measures_on_its_own_data_before_a_block(tmp_path: Path, calm: Calm, kill: str) -> None:
    """Regression: the replacement of rank 0 added its own pass to the statistics of another rank."""
    told, output = ends(tmp_path / "job", JOB, "measuring", kill)
    assert told == calm("measuring"), output
    assert "1 fault, 0 steps lost" in output, output
