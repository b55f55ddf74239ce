"""DDP around a compiled module, and DDP with communication hooks."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.exit_codes import Exit
from tests.session.launch import run_job, run_torchrun
from tests.session.wrapped_job import STEPS

pytestmark = [pytest.mark.torch, pytest.mark.processes]

JOB = str(Path(__file__).with_name("wrapped_job.py"))


RANKS = 2


def digests(where: Path, what: str, *kill: int) -> list[str]:
    """Run the job. Return the digest of the weights of each rank."""
    where.mkdir()
    done = run_job(where, RANKS, JOB, "--what", what, "--kill", *map(str, kill))
    assert done.returncode == 0, done.stdout
    assert {path.name for path in where.glob("killed-*")} == {f"killed-{step}" for step in kill}
    return [path.read_text() for path in sorted(where.glob("digest-*"))]


@pytest.mark.more
def test_ddp_around_a_compiled_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The newcomer finds compiled code in the cache. On loading it, inductor asks every group for its backend."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    calm = digests(tmp_path / "calm", "compiled")
    assert digests(tmp_path / "struck", "compiled", STEPS - 3) == calm
    assert len(calm) == RANKS and len(set(calm)) == 1


@pytest.mark.more
def test_a_hook_without_a_state_is_as_good_in_a_newcomer(tmp_path: Path) -> None:
    calm = digests(tmp_path / "calm", "fp16_compress_hook")
    assert digests(tmp_path / "struck", "fp16_compress_hook", STEPS - 3) == calm
    assert len(calm) == RANKS and len(set(calm)) == 1


@pytest.mark.parametrize("when", [[], pytest.param(["--late"], marks=pytest.mark.more)])
def test_a_hook_with_a_state_is_refused_by_name(tmp_path: Path, when: list[str]) -> None:
    done = run_job(tmp_path, RANKS, JOB, "--what", "powerSGD_hook", *when)
    assert done.returncode == Exit.BAD_INPUT, done.stdout
    assert "hook powerSGD_hook has a state (PowerSGDState) that a replacement would not have" in done.stdout
    assert "next: use a hook without a state: model.register_comm_hook(None, " in done.stdout


@pytest.mark.more
def test_under_torchrun_nobody_is_replaced_alone(tmp_path: Path) -> None:
    """Under torchrun, a fault ends all ranks, and all hooks start again together."""
    done = run_torchrun(tmp_path, 2, JOB, "--what", "powerSGD_hook")
    assert done.returncode == 0, done.stdout
    assert len(list(tmp_path.glob("digest-*"))) == 2
