"""User code raises in every rank at once, or outside of a step: committed steps stay, and no rank trains them again."""

from __future__ import annotations

import functools
import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from holdfast.exit_codes import Exit
from holdfast.store.manage.checkpoint_root import Root
from tests.session.launch import run_job

pytestmark = [pytest.mark.torch, pytest.mark.processes]

JOB = str(Path(__file__).with_name("fallen_job.py"))
STEPS = 12


def run(
    where: Path, what: str, layout: str = "ddp", *more: str
) -> tuple[subprocess.CompletedProcess[str], list[str]]:
    """Run a job of four (HSDP) or three workers. Return its result, and the final digests."""
    where.mkdir()
    nproc = 4 if layout == "hsdp" else 3
    done = run_job(where, nproc, JOB, "--what", what, "--layout", layout, "--result", "result", *more)
    found = sorted(where.glob("result/rank-*.json"))
    return done, [json.loads(path.read_text())["digest"] for path in found]


def events(where: Path, kind: str) -> list[dict[str, object]]:
    """Return the data of the events of one kind."""
    (log,) = where.glob("runs/*/events.jsonl")
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    return [line["data"] for line in lines if line["kind"] == kind]


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], list[str]]:
    """Return the digests of the undisturbed run of a layout."""

    @functools.cache
    def digests(layout: str) -> list[str]:
        done, found = run(tmp_path_factory.mktemp("calm") / "job", "", layout)
        assert done.returncode == 0 and found, done.stdout
        return found

    return digests


@pytest.mark.parametrize(
    ("what", "layout"),
    [
        pytest.param("raise", "ddp", marks=pytest.mark.more),
        pytest.param("raise", "hsdp", marks=pytest.mark.more),
        ("metric", "hsdp"),
        ("exit", "ddp"),
        ("exit-after", "ddp"),
        pytest.param("exit", "hsdp", marks=pytest.mark.more),
        ("caught", "ddp"),
    ],
)
def test_no_step_is_lost_and_the_bits_stay(
    tmp_path: Path, calm: Callable[[str], list[str]], what: str, layout: str
) -> None:
    done, digests = run(tmp_path / "struck", what, layout)
    assert done.returncode == 0, done.stdout
    assert [r["steps_lost"] for r in events(tmp_path / "struck", "restored")] == [0, 0], done.stdout
    assert digests == calm(layout), done.stdout


def test_an_exception_in_every_life_ends_the_run_and_is_named(tmp_path: Path) -> None:
    done, _ = run(tmp_path / "job", "always", "ddp", "--keep", "1")
    assert done.returncode == Exit.FAILED, done.stdout
    assert "the same exception at step 5 twice: ValueError: nan" in done.stdout
    actions = [verdict["action"] for verdict in events(tmp_path / "job", "verdict")]
    assert len(actions) == 2 and actions[1] == "stop_user_bug", done.stdout
    left = [found.step for found in Root(tmp_path / "job" / "ckpt").list()]
    assert left == [5], "what was done before is saved, and counts as the one that is kept"


def test_an_exit_of_all_ranks_in_every_life_saves_the_last_step_and_ends_the_run(tmp_path: Path) -> None:
    done, _ = run(tmp_path / "job", "exit-always")
    assert done.returncode == Exit.FAILED, done.stdout
    assert "the same exception at step 5 twice: SystemExit: exit code 3 inside the block" in done.stdout
    assert "next: read why the script ended itself: holdfast logs" in done.stdout
    assert [found.step for found in Root(tmp_path / "job" / "ckpt").list()] == [5], done.stdout


def test_an_exception_between_two_steps_that_comes_back_ends_the_run(tmp_path: Path) -> None:
    """No restart runs that code again at the same step.

    After the next step, the message is equal except for its numbers.
    """
    done, _ = run(tmp_path / "job", "check")
    assert done.returncode == Exit.FAILED, done.stdout
    assert "the same exception at steps 6, 7: ValueError: after step 6 the loss of rank" in done.stdout
    assert len(events(tmp_path / "job", "generation_started")) == 2, done.stdout
    assert max(found.step for found in Root(tmp_path / "job" / "ckpt").list()) == 7, "what was done is saved"


@pytest.mark.more
@pytest.mark.parametrize("save_every", ["1000", pytest.param(str(STEPS), marks=pytest.mark.more)])
def test_an_end_that_cannot_be_saved_is_said_and_nothing_is_trained_again(
    tmp_path: Path, save_every: str
) -> None:
    """The end may have been handed over as a periodic save, which then could not be written."""
    done, digests = run(tmp_path / "job", "spoil", "ddp", "--save-every", save_every)
    assert done.returncode == Exit.BAD_INPUT and digests == [], done.stdout
    assert "StoreWriteError" in done.stdout
    assert len(events(tmp_path / "job", "generation_started")) == 1, done.stdout


@pytest.mark.more
def test_a_death_after_an_exit_was_saved_ends_the_run(tmp_path: Path) -> None:
    done, _ = run(tmp_path / "job", "leave")
    assert done.returncode == Exit.REQUEUE, done.stdout
    assert len(events(tmp_path / "job", "generation_started")) == 1, done.stdout


@pytest.mark.parametrize("place", ["block", "after"])
def test_an_exception_that_comes_after_that_of_another_rank_does_not_end_the_epoch(
    tmp_path: Path, place: str
) -> None:
    """The loop is closed before the fault is known, and the session sees the exception after it."""
    done = run_job(tmp_path, 2, str(Path(__file__).with_name("raised_job.py")), place)
    assert done.returncode == 0, done.stdout
    assert "rank 0 ends at step 8" in done.stdout, done.stdout
