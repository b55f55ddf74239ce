"""One rank alone cannot load a checkpoint: all ranks take the next one, or all stop."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.exits import Exit
from holdfast.store.root import Root
from tests.session.launch import run_job

pytestmark = [pytest.mark.torch, pytest.mark.processes]

JOB = str(Path(__file__).with_name("resume_job.py"))


def run(where: Path, *arguments: str) -> tuple[int, str]:
    """Exit code of two ranks, and what they logged."""
    done = run_job(where, 2, JOB, "--checkpoint", str(where / "ckpts"), *arguments)
    newest = max((where / "runs").iterdir(), key=lambda p: p.stat().st_mtime_ns)
    return done.returncode, "".join(log.read_text() for log in sorted(newest.glob("attempt-*/rank-*.log")))


def test_damage_that_one_rank_meets_is_answered_by_all(tmp_path: Path) -> None:
    code, said = run(tmp_path, "--until", "4")
    assert code == 0, said
    newest, before, *_ = Root(
        tmp_path / "ckpts"
    ).list()  # a save that comes too soon after another one is left out
    assert newest.step == 4
    (shard,) = Path(newest.path).glob("shard-r00001-*.safetensors")  # rank 0 never reads it
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
    assert said.count("missing: other.weight") >= 2  # both say what differs
