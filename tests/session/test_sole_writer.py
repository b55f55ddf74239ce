"""Two runs that use one checkpoint directory at the same time."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.session.checkpoints import sole_writer
from holdfast.session.checkpoints.sole_writer import SoleUse
from tests.session.test_solo import Job

TOLD = "another live run saves in"
LIVES = """
import sys, time
from pathlib import Path
from holdfast.session.checkpoints.sole_writer import SoleUse
held = SoleUse(Path(sys.argv[1]), tells=True)
print("holds", flush=True)
time.sleep(3600)
"""


@pytest.mark.torch
def test_the_second_live_run_in_a_directory_says_so_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sole_writer, "WAIT_S", 0.1)
    words = [sys.executable, "-c", LIVES, str(tmp_path)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None and other.stdout.readline() == "holds\n"
        Job().train(2, checkpoint=tmp_path)
        other.send_signal(signal.SIGKILL)
    assert caplog.text.count(TOLD) == 1 and str(tmp_path) in caplog.text
    caplog.clear()
    for until in (3, 4):  # one after the other; the killed one leaves nothing
        Job().train(until, checkpoint=tmp_path)
    assert TOLD not in caplog.text and not [p.name for p in tmp_path.iterdir() if p.is_file()]


def test_a_run_that_goes_on_meets_what_its_lost_rank_has_left(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    left = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(left, fcntl.LOCK_EX)
    SoleUse(tmp_path, tells=False).close()
    os.close(left)
    for place in (
        tmp_path,
        tmp_path / "absent",
        tmp_path,
    ):  # also if a session of this process could not open
        SoleUse(place, tells=True)
    SoleUse(tmp_path).close()
    assert TOLD not in caplog.text
