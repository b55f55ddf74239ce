"""A checkpoint disk that is full for a while, or memory without room for the copy of a save."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest

from holdfast.errors import StoreWriteError
from holdfast.exit_codes import Exit
from holdfast.store.manage.checkpoint_root import Root
from tests.runtime.runs import until
from tests.session.launch import run_job
from tests.session.room_job import STEPS
from tests.session.test_jobs import events
from tests.session.test_solo import Job

pytestmark = pytest.mark.torch


def is_written(path: Path, size_bytes: int) -> bool:
    """Write that many bytes or none. Return whether they were written."""
    try:
        path.write_bytes(bytes(size_bytes))
    except OSError:
        path.unlink()
        return False
    return True


def test_failed_saves_leave_nothing_on_a_full_disk(tiny_disk: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Remains of failed saves would take the space that is freed for the next save."""
    job, ballast, root = Job(width=1500), tiny_disk / "ballast", Root(tiny_disk / "ckpt")
    full = freed = 0
    with job.session(checkpoint=tiny_disk / "ckpt", save=1, keep=1) as s:
        for step in s.steps(job.loader, until=10_000):
            if not full and any(found.valid for found in root.list()):
                until("a save in flight has made room", lambda: is_written(ballast, 750_000))
                full = step.number
            if not freed and caplog.text.count("was not saved") >= 3:
                until("the wrecks are gone", lambda: [found.valid for found in root.list()] == [True])
                ballast.unlink()
                freed = step.number
            if freed and root.newest_valid().require().step > freed:
                break
            with step as batch:
                job.update(batch)
    assert freed > full


@pytest.mark.parametrize("fails", [False, True], ids=["final", "rescue"])
def test_a_last_save_that_fails_leaves_nothing(tiny_disk: Path, fails: bool) -> None:
    job = Job(width=1500)
    (tiny_disk / "ballast").write_bytes(bytes(1_000_000))
    expected = ZeroDivisionError if fails else StoreWriteError
    with pytest.raises(expected), job.session(checkpoint=tiny_disk / "ckpt") as s:
        for step in s.steps(job.loader, until=3):
            with step as batch:
                job.update(batch)
            if fails and step.number == 1:
                raise ZeroDivisionError
    assert not list((tiny_disk / "ckpt").iterdir())


@pytest.mark.processes
def test_a_last_step_that_one_rank_had_no_room_for_is_saved_by_all(tmp_path: Path) -> None:
    """Regression: the periodic save failed on one rank. The others had handed theirs over, and waited for ever."""
    done = run_job(tmp_path, 2, str(Path(__file__).with_name("room_job.py")))
    assert done.returncode == 0, done.stdout
    assert f"rank 1 could not save step {STEPS}: no memory for a copy" in done.stdout
    newest = Root(tmp_path / "ckpt").newest_valid(deep=True).require()
    assert newest.save_id is not None and (newest.step, newest.save_id.kind) == (STEPS, "final")


@pytest.mark.processes
def test_every_rank_says_what_the_disk_of_one_has_said(tmp_path: Path) -> None:
    """Regression: depending on the order of reports, the run ended with the other rank's "its log says why"."""
    done = run_job(tmp_path, 2, str(Path(__file__).with_name("room_job.py")), "stays")
    assert done.returncode == Exit.BAD_INPUT, done.stdout
    (log,) = tmp_path.glob("runs/*/attempt-000/rank-00000.log")
    assert f"step {STEPS} is not saved: rank 1: cannot write {tmp_path / 'ckpt'}" in log.read_text()
    last = [line for line in done.stdout.splitlines() if line.startswith("error: ")][-1]
    assert "File too large" in last and str(tmp_path / "ckpt") in last
    assert "raise the file size limit" in done.stdout
    saved = [event["data"] for event in events(tmp_path, "saved") if event["data"]["save_kind"] == "final"]
    assert sorted((each["rank"], bool(each["error"])) for each in saved) == [(0, False), (1, True)]


@pytest.mark.parametrize("full", ["memory", "disk"])
def test_a_periodic_save_that_failed_is_no_reason_not_to_rescue(
    tiny_disk: Path, caplog: pytest.LogCaptureFixture, full: str
) -> None:
    job, ballast = Job(width=1500), tiny_disk / "ballast"
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    with pytest.raises(ZeroDivisionError), job.session(checkpoint=tiny_disk / "ckpt", save=2) as s:
        for step in s.steps(job.loader, until=3):
            if step.number == 2:
                until("the save has failed", lambda: "step 2 was not saved" in caplog.text)
                resource.setrlimit(resource.RLIMIT_FSIZE, before)
                ballast.unlink(missing_ok=True)
                raise ZeroDivisionError
            with step as batch:
                job.update(batch)
            if step.number == 1 and full == "memory":
                resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
            elif step.number == 1:
                ballast.write_bytes(bytes(1_000_000))
    newest = Root(tiny_disk / "ckpt").newest_valid(deep=True).require()
    assert newest.save_id is not None and (newest.step, newest.save_id.kind) == (2, "last-gasp")
