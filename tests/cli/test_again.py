"""A second run with the same ``--run-id``, as after a requeue by a scheduler or after the hint in a run's last line."""

from __future__ import annotations

import re
import shlex
import signal
from pathlib import Path

import pytest

from holdfast.exit_codes import Exit
from tests.cli.command import Run, working_in
from tests.cli.test_run import script, start

__all__ = ["script"]

pytestmark = pytest.mark.processes


def test_an_ended_start_is_put_aside_and_its_checkpoints_stay(holdfast: Run, tmp_path: Path) -> None:
    args = ("run", "--run-id", "mine", "--log-dir", "logs", "train.py")
    for word in ("first", "second", "third"):
        result = holdfast(*args, word)
        assert result.returncode == 0, result.stderr
        assert result.stdout == f"rank 0 says ['{word}']\n", "nothing of an earlier start"
        if word == "first":
            (tmp_path / "runs/mine/checkpoints/step-1").mkdir(parents=True)
    assert "runs/mine.2, its checkpoints stay" in result.stderr
    assert (tmp_path / "runs/mine/checkpoints/step-1").is_dir()
    assert not list(tmp_path.glob("runs/mine.*/checkpoints"))
    for name, word in (("mine.1", "first"), ("mine.2", "second"), ("mine", "third")):
        assert word in holdfast("logs", name).stdout
    assert "third" in holdfast("logs").stdout, "the newest one"


def test_one_that_lost_its_launcher_is_waited_for(holdfast: Run, tmp_path: Path) -> None:
    first = start(tmp_path)
    first.send_signal(signal.SIGKILL)
    first.communicate()
    result = holdfast("run", "--run-id", "mine", "train.py")
    assert result.returncode == 0, result.stderr
    assert '"code":76' in (tmp_path / "runs/mine.1/events.jsonl").read_text(), "it was let leave in order"
    assert working_in(tmp_path) == {}


def test_one_that_goes_on_is_left_alone(holdfast: Run, tmp_path: Path) -> None:
    first = start(tmp_path)
    result = holdfast("run", "--run-id", "mine", "train.py")
    assert result.returncode == Exit.USAGE and "run mine still has processes" in result.stderr
    assert "next: holdfast status" in result.stderr and "holdfast exit" in result.stderr
    first.send_signal(signal.SIGINT)
    first.communicate()
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["mine"]


@pytest.mark.more
def test_one_that_cannot_be_put_aside_is_gone_on_with_under_another_name(
    holdfast: Run, tmp_path: Path
) -> None:
    args = ("run", "--log-dir", "logs", "train.py")
    assert holdfast(*args[:1], "--run-id", "mine", *args[1:]).returncode == 0
    saved = tmp_path / "runs/mine/checkpoints/step-1"
    saved.mkdir(parents=True)
    (tmp_path / "logs/mine.1").write_text("in the way of its logs")
    refused = holdfast(*args[:1], "--run-id", "mine", *args[1:])
    assert refused.returncode == Exit.USAGE and "cannot put the earlier start" in refused.stderr
    (hint,) = re.findall(
        r"choose another --run-id, and (--root .*) to continue", " ".join(refused.stderr.split())
    )
    again = holdfast(*args[:1], "--run-id", "other", *shlex.split(hint), *args[1:])
    assert again.returncode == 0, again.stderr
    assert shlex.split(hint)[1] == str(saved.parent) and saved.is_dir()


def test_a_directory_that_is_no_run_is_left_alone(holdfast: Run, tmp_path: Path) -> None:
    kept = tmp_path / "runs/mine/thesis.tex"
    kept.parent.mkdir(parents=True)
    kept.touch()
    refused = holdfast("run", "--run-id", "mine", "train.py")
    assert refused.returncode == Exit.USAGE and "is no run" in refused.stderr
    assert "remove" not in refused.stderr and kept.exists()
