"""Mistakes of one rank: the rank is named at once, and the run ends with the cause."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast import event_log
from holdfast.exit_codes import Exit
from tests.session.launch import run_job
from tests.session.mistake_job import AT

pytestmark = [pytest.mark.torch, pytest.mark.processes]

JOB = str(Path(__file__).with_name("mistake_job.py"))


@pytest.mark.parametrize(
    ("mistake", "code", "told"),
    [
        pytest.param(
            "exit before the model",
            Exit.FAILED,
            "rank 1 left with code 0 while others computed",
            marks=pytest.mark.more,
        ),
        ("exit before the loop", Exit.FAILED, "it has left its loop at step 0"),
        pytest.param(
            "break in the block",
            Exit.BAD_INPUT,
            f"the script has left its loop after the block of step {AT}",
            marks=pytest.mark.more,
        ),
        ("exit in the block", Exit.FAILED, f"exit code 0 inside the block of step {AT}, {JOB}:"),
    ],
)
def test_a_rank_that_leaves_the_others_alone_is_the_first_that_is_named(
    tmp_path: Path, mistake: str, code: Exit, told: str
) -> None:
    done = run_job(tmp_path, 2, "--run-id", "it", JOB, mistake)
    assert done.returncode == code, done.stdout
    assert told in " ".join(done.stdout.split("error: run it: ")[-1].split()), done.stdout
    assert "read the traceback" not in done.stdout, done.stdout  # there is no traceback
    events = event_log.read(tmp_path / "runs/it/events.jsonl").events
    assert next(e.data["rank"] for e in events if e.kind == "detected") == 1, done.stdout
    assert sum(e.kind == "verdict" for e in events) <= 2, done.stdout


@pytest.mark.more
def test_ranks_that_the_script_starts_itself_are_named(tmp_path: Path) -> None:
    done = run_job(tmp_path, 1, str(Path(__file__).with_name("spawned_job.py")))
    said = " ".join(done.stdout.split())
    assert done.returncode != 0 and "of 2 was started by the script itself (multiprocessing)" in said, said
    assert (
        "next: holdfast run --nproc-per-node 2, and let the script call the function of a rank once" in said
    )
