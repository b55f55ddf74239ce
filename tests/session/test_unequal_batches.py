"""Real processes: ranks with unequal numbers of batches are refused by name before code after the loop runs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from holdfast import event_log
from holdfast.exit_codes import Exit
from tests.session.launch import run_job, run_torchrun
from tests.session.unequal_job import BATCHES, EPOCHS, UNTIL

pytestmark = [pytest.mark.torch, pytest.mark.processes]

JOB = str(Path(__file__).with_name("unequal_job.py"))
ERROR = (
    f"UnequalBatchesError: rank 0 has no batch for step {BATCHES}, after {BATCHES} steps of this loop, and rank 1 has "
    "one: the ranks have different numbers of batches"
)


@pytest.mark.parametrize(
    "kind", ["plain", "a sum of the size of the gradients", "no collective in the block"]
)
def test_unequal_numbers_of_batches_end_the_run_by_name(tmp_path: Path, kind: str) -> None:
    for again in (False, True):  # the second start resumes at the end of the loop of rank 0
        done = run_job(tmp_path, 2, "--run-id", f"it-{int(again)}", JOB, kind, str(tmp_path))
        assert done.returncode == Exit.BAD_INPUT, done.stdout
        assert ERROR in " ".join(done.stdout.split()), done.stdout
        assert re.search(r"next: give every rank the same number of batches: .*until=N", done.stdout)
        assert "after the loop of epoch" not in done.stdout, "no rank runs code after its loop"
        events = event_log.read(tmp_path / f"runs/it-{int(again)}/events.jsonl").events
        assert sum(e.kind == "verdict" for e in events) == 1, "no restart"
        assert f"after: step {BATCHES}," in done.stdout, "no committed step is lost"
    assert f"newest checkpoint: step {BATCHES}," in done.stdout


def test_a_rank_that_alone_leaves_its_loop_is_named_and_ends_the_run(tmp_path: Path) -> None:
    """Regression: after the restart both ranks stood still for ten minutes, and then again."""
    done = run_job(tmp_path, 2, "--run-id", "it", "--hang-floor", "0.3", JOB, "break alone", str(tmp_path))
    assert done.returncode == Exit.FAILED, done.stdout
    assert f"the same hang at step {BATCHES} twice" in done.stdout, done.stdout
    events = event_log.read(tmp_path / "runs/it/events.jsonl").events
    detected = [e.data for e in events if e.kind == "detected"]
    assert {(d["rank"], d["kind"], d["step"]) for d in detected} == {(0, "hang", BATCHES)}, done.stdout
    assert len(detected) <= 3, "each restart makes the same collectives"


@pytest.mark.more
def test_another_launcher_gets_the_name_as_well(tmp_path: Path) -> None:
    done = run_torchrun(tmp_path, 2, JOB, "plain", str(tmp_path))
    assert done.returncode != 0 and ERROR in " ".join(done.stdout.split()), done.stdout
    assert [path.name[:13] for path in (tmp_path / "ckpts").iterdir()] == [f"step-{BATCHES:08d}"]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """Return the digests of the weights of an undisturbed run with equal numbers of batches."""
    place = tmp_path_factory.mktemp("undisturbed")
    done = run_job(place, 2, JOB, "equal", str(place))
    assert done.returncode == 0, done.stdout
    assert f"(step {BATCHES * EPOCHS}, goodput" in done.stdout, done.stdout
    return {path.read_text() for path in place.glob("digest-*")}


@pytest.mark.parametrize(
    "kind",
    [
        "break",
        "break, held",
        "lost at the end, replaced",
        *(
            pytest.param(kind, marks=pytest.mark.more)
            for kind in ("lost before the end, replaced", "lost before the end", "lost at the end")
        ),
    ],
)
def test_ranks_that_end_at_the_same_step_are_not_refused(
    tmp_path: Path, undisturbed: set[str], kind: str
) -> None:
    done = run_job(tmp_path, 2, JOB, kind, str(tmp_path))
    assert done.returncode == 0, done.stdout
    ended = f"(step {BATCHES * EPOCHS}, " + (
        "goodput" if kind.startswith("break") else "1 fault, 0 steps lost"
    )
    assert ended in done.stdout, done.stdout
    assert {path.read_text() for path in tmp_path.glob("digest-*")} == undisturbed
    if kind.endswith("replaced"):
        (log,) = tmp_path.glob("runs/*/events.jsonl")
        assert [e.data["action"] for e in event_log.read(log).events if e.kind == "verdict"] == ["replace"]


@pytest.fixture(scope="module")
def until(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """Return the digests of the weights of an undisturbed run whose epochs end at a step, with unequal loaders."""
    place = tmp_path_factory.mktemp("until")
    done = run_job(place, 2, JOB, "until", str(place))
    assert done.returncode == 0, done.stdout
    return {path.read_text() for path in place.glob("digest-*")}


@pytest.mark.parametrize(
    ("lost", "flags"),
    [
        (UNTIL + 3, ()),  # the loader of rank 0 has begun again
        (UNTIL, ()),  # an epoch begins where the epoch before has ended
        pytest.param(UNTIL, ("--on-fault", "restart"), marks=pytest.mark.more),
        pytest.param(UNTIL + 3, ("--on-fault", "restart"), marks=pytest.mark.more),
    ],
)
def test_each_rank_continues_at_its_own_position_in_unequal_data(
    tmp_path: Path, until: set[str], lost: int, flags: tuple[str, ...]
) -> None:
    """Regression: a process that joined or resumed took the position of another rank, without a word."""
    done = run_job(tmp_path, 2, *flags, JOB, f"until, lost {lost}", str(tmp_path))
    assert done.returncode == 0, done.stdout
    assert f"(step {UNTIL * EPOCHS}, 1 fault, 0 steps lost" in done.stdout, done.stdout
    assert {path.read_text() for path in tmp_path.glob("digest-*")} == until
