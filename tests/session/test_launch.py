"""The tests' own runs of jobs: a run that is given up shows its output, and none of its processes remains."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from pathlib import Path

import pytest

from holdfast.runtime.node.rundir import RunDir
from tests.cli.command import working_in
from tests.runtime.runs import until, without_torch
from tests.session import launch

pytestmark = pytest.mark.processes

SCRIPT = """\
import os, pathlib, time
print("rank", os.environ["RANK"], "hangs", flush=True)
pathlib.Path("hangs-" + os.environ["RANK"]).touch()
time.sleep(1000)
"""


class GivenUp(BaseException):
    """An exception like pytest's timeout: raised by a signal, and not a subclass of Exception."""


def give_up(*_: object) -> None:
    raise GivenUp


def hang(where: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run a job that never ends."""
    for name, value in without_torch(where).items():
        monkeypatch.setenv(name, value)
    (where / "train.py").write_text(SCRIPT)
    launch.run_job(where, 2, "--run-id", "it", "train.py")


def check(where: Path) -> None:
    """Check that no process and no status page of the run is left."""
    assert working_in(where) == {}
    assert not RunDir(where / "runs/it").pages_link.is_symlink()


def test_a_job_that_is_interrupted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def interrupt() -> None:
        until("both hang", lambda: len(list(tmp_path.glob("hangs-*"))) == 2)
        until("its page is there", lambda: RunDir(tmp_path / "runs/it").pages_link.is_symlink())
        os.kill(os.getpid(), signal.SIGUSR1)

    before = signal.signal(signal.SIGUSR1, give_up)
    watching = threading.Thread(target=interrupt)
    watching.start()
    try:
        with pytest.raises(GivenUp):
            hang(tmp_path, monkeypatch)
    finally:
        watching.join()
        signal.signal(signal.SIGUSR1, before)
    said = capfd.readouterr().out
    assert "rank 1 hangs" in said and "member_started" in said
    check(tmp_path)


def test_a_job_that_takes_too_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "BOUND_S", 3.0)
    with pytest.raises(subprocess.TimeoutExpired):
        hang(tmp_path, monkeypatch)
    check(tmp_path)
