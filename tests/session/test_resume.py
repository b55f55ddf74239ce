"""Only one rank cannot load a checkpoint: all ranks take the next checkpoint, or all stop."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest

from holdfast.errors import NothingToResume
from holdfast.exit_codes import Exit
from holdfast.runtime.node.file_owners import planted
from holdfast.store.manage.checkpoint_root import Root
from tests.session.launch import run_job
from tests.session.test_solo import Job

pytestmark = [pytest.mark.torch, pytest.mark.processes]

JOB = str(Path(__file__).with_name("resume_job.py"))


def run(where: Path, *arguments: str) -> tuple[int, str]:
    """Run two ranks. Return the exit code and their logs."""
    done = run_job(where, 2, JOB, "--checkpoint", str(where / "ckpts"), *arguments)
    newest = max((where / "runs").iterdir(), key=lambda p: p.stat().st_mtime_ns)
    return done.returncode, "".join(log.read_text() for log in sorted(newest.glob("attempt-*/rank-*.log")))


def test_damage_that_one_rank_meets_is_answered_by_all(tmp_path: Path) -> None:
    code, said = run(tmp_path, "--until", "4")
    assert code == 0, said
    newest, before, *_ = Root(
        tmp_path / "ckpts"
    ).list()  # a save that comes too soon after another is skipped
    assert newest.step == 4
    (shard,) = Path(newest.path).glob("shard-r00001-*.safetensors")  # rank 0 never reads this shard
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    code, said = run(tmp_path, "--until", "5")
    assert code == 0, said
    assert f"resumed at step {before.step} from" in said
    assert (
        said.count("another rank could not load it") == 1
        and said.count("no intact copy of second.weight") == 1
    )

    code, said = run(tmp_path, "--until", "6", "--odd", "1")
    assert code == Exit.BAD_INPUT, said
    assert "cannot be loaded by 1 rank; rank 1: " in said  # rank 0, whose model fits
    assert said.count("missing: other.weight") >= 2  # both ranks report the difference


def test_a_first_save_that_was_never_finished_is_no_reason_not_to_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """An unfinished first save is what a loss of power leaves.

    If the save was complete once (``SEALED``), its damage prevents a start.
    """
    Job().train(3, checkpoint=tmp_path, save_every_steps=3)
    (only,) = (Path(v.path) for v in Root(tmp_path).list())
    (only / "rank-r00000.json").unlink()
    with pytest.raises(NothingToResume, match=only.name):
        Job().train(3, checkpoint=tmp_path)
    (only / "SEALED").unlink()
    with caplog.at_level(logging.WARNING, "holdfast"):
        assert Job().train(2, checkpoint=tmp_path) == [0, 1]
    assert "holds only 1 unfinished save" in caplog.text


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_a_checkpoint_that_anybody_may_have_planted_is_not_taken_unasked(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Every user can write into the directory. Regression: a session resumed from the highest step of any user."""
    Job().train(2, checkpoint=tmp_path, save_every_steps=2)
    Job().train(4, checkpoint=tmp_path, save_every_steps=2)
    newest, before, *_ = Root(tmp_path).list()
    os.chown(newest.path, 54321, -1)
    assert planted(tmp_path, [newest.name]) == {}, "others cannot write here"
    tmp_path.chmod(0o1777)
    with caplog.at_level(logging.WARNING, "holdfast"):
        assert Job().train(3, checkpoint=tmp_path) == [before.step]
    assert f"{newest.name}: it belongs to the user id 54321, and every user can write" in caplog.text
    assert Job().train(5, checkpoint=tmp_path, resume=newest.path) == [newest.step]
    for attempt in Root(tmp_path).list():
        os.chown(attempt.path, 54321, -1)
    with pytest.raises(NothingToResume, match="to take it: resume="):
        Job().train(6, checkpoint=tmp_path)
