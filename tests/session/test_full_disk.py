"""A checkpoint disk that is full for a while."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.errors import StoreWriteError
from holdfast.store.root import Root
from tests.runtime.runs import until
from tests.session.test_solo import Job

pytestmark = pytest.mark.torch


def is_written(path: Path, size_bytes: int) -> bool:
    """Write that many bytes, or none."""
    try:
        path.write_bytes(bytes(size_bytes))
    except OSError:
        path.unlink()
        return False
    return True


def test_failed_saves_leave_nothing_on_a_full_disk(tiny_disk: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Else the space that is freed would be too little for the next one."""
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
