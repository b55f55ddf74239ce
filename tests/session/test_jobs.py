"""Real processes: a session equals a bare torch loop bit for bit, disturbed or not, with every launcher."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from holdfast.exit_codes import Exit
from holdfast.store.manage.checkpoint_root import Root
from tests.session.launch import run_job, run_torchrun

pytestmark = [pytest.mark.torch, pytest.mark.processes]

JOB = str(Path(__file__).with_name("job.py"))
BIN = Path(sys.executable).parent
STEPS = 9
RANKS = 4


class Result:
    """The files and output of one run of ``job.py``."""

    def __init__(self, code: int, output: str, directory: Path) -> None:
        self.code = code
        self.output = output
        found: list[dict[str, Any]] = [
            json.loads(p.read_text()) for p in sorted(directory.glob("rank-*.json"))
        ]
        self.digests = [one["digest"] for one in found]
        self.pids = [one["pid"] for one in found]
        self.before = [one["before"] for one in found]
        self.after = [one["after"] for one in found]


def start(
    launcher: str, where: Path, *arguments: str, flags: tuple[str, ...] = (), ranks: int = RANKS
) -> Result:
    """Run the job in ``where``."""
    where.mkdir(exist_ok=True)
    result = where / "result"
    ran = {"holdfast": run_job, "torchrun": run_torchrun}[launcher]
    done = ran(where, ranks, *flags, JOB, "--steps", str(STEPS), "--result", str(result), *arguments)
    return Result(done.returncode, done.stdout, result)


def events(where: Path, kind: str) -> list[dict[str, Any]]:
    """Return the events of one kind in the run's event log."""
    (log,) = where.glob("runs/*/events.jsonl")
    # The last line in the log of a running job may be half written.
    whole = (line for line in log.read_text().splitlines(keepends=True) if line.endswith("\n"))
    return [line for line in map(json.loads, whole) if line.get("kind") == kind]


@pytest.mark.parametrize("layout", ["ddp", pytest.param("hsdp", marks=pytest.mark.more)])
def test_cut_connections_are_answered_in_place(
    tmp_path: Path, bare: Callable[[str], Result], layout: str
) -> None:
    got = start("holdfast", tmp_path, "--layout", layout, "--cut", "1@4")
    assert got.code == 0, got.output
    assert got.digests == bare(layout).digests
    assert "retry in place" in got.output
    assert len(list(tmp_path.glob("runs/*/attempt-*"))) == 1


@pytest.mark.executes_zygotes
@pytest.mark.parametrize(
    ("layout", "victim", "rung"),
    [
        ("ddp", "0@4", "replace"),
        pytest.param("hsdp", "2@4", "replace", marks=pytest.mark.more),
        pytest.param("ddp", "1@4", "restart_last_gasp", marks=pytest.mark.more),
        pytest.param("hsdp", "3@0", "restart_fresh", marks=pytest.mark.more),
    ],
)
def test_killed_rank_loses_nothing(
    tmp_path: Path, bare: Callable[[str], Result], layout: str, victim: str, rung: str
) -> None:
    flags = () if rung == "replace" else ("--on-fault", "restart")
    compiled = ("--compiled",) if (layout, rung) == ("ddp", "replace") else ()
    got = start("holdfast", tmp_path, "--layout", layout, "--die", victim, *compiled, flags=flags)
    assert got.code == 0, got.output
    assert got.digests == bare(layout).digests
    assert [verdict["data"]["action"] for verdict in events(tmp_path, "verdict")] == [rung]
    assert len(list(tmp_path.glob("runs/*/attempt-*"))) == (1 if rung == "replace" else 2)
    if rung == "replace":
        check_survivors(got, newcomer=int(victim[0]), graphs=len(compiled))


@pytest.mark.more
def test_a_torn_survivor_is_replaced_too(tmp_path: Path, bare: Callable[[str], Result]) -> None:
    """Rank 1 dies in its update.

    Rank 2 leaves its update half done. Both seats get the state of the two other ranks.
    """
    got = start("holdfast", tmp_path, "--layout", "ddp", "--die-late", "1@4", "--tear", "2@4")
    assert got.code == 0, got.output
    assert got.digests == bare("ddp").digests
    assert [verdict["data"]["action"] for verdict in events(tmp_path, "verdict")] == ["replace"]
    assert [event["data"]["ranks"] for event in events(tmp_path, "members_replaced")] == [[1, 2]]


def check_survivors(got: Result, newcomer: int, graphs: int) -> None:
    """Check that process, model, parameters' memory and compiled code are unchanged. The newcomer compiles again."""
    assert [rank for rank in range(RANKS) if not got.before[rank]] == [newcomer]
    for rank in range(RANKS):
        assert rank == newcomer or got.before[rank] == got.after[rank]
    assert [one["graphs"] for one in got.after] == [graphs] * RANKS


def test_graceful_exit_and_the_next_run(tmp_path: Path, bare: Callable[[str], Result]) -> None:
    root = tmp_path / "ckpts"
    arguments = ("--layout", "hsdp", "--checkpoint", str(root), "--ask-exit", "2@3")
    first = start("holdfast", tmp_path, *arguments)
    assert first.code == Exit.REQUEUE, first.output
    assert first.output.count("Graceful exit is triggered, stop training") >= 1
    (saved,) = Root(root).list()
    assert saved.valid and 4 <= saved.step < STEPS
    assert saved.save_id is not None and saved.save_id.kind == "exit"
    second = start("holdfast", tmp_path, *arguments)
    assert second.code == 0, second.output
    assert f"resumed at step {saved.step}" in second.output
    assert second.digests == bare("hsdp").digests


def test_a_job_level_answer_saves_the_step_and_the_same_command_continues(
    tmp_path: Path, bare: Callable[..., Result]
) -> None:
    """A rank is killed in a step that is not committed: the next start does that step, and no other one again."""
    arguments = ("--layout", "ddp", "--checkpoint", str(tmp_path / "ckpts"), "--die", "1@4")
    first = start("holdfast", tmp_path, *arguments, flags=("--on-fault", "job"), ranks=2)
    assert first.code == Exit.REQUEUE, first.output
    assert [verdict["data"]["rung"] for verdict in events(tmp_path, "verdict")] == ["requeue"]
    (saved,) = Root(tmp_path / "ckpts").list()
    assert saved.valid and saved.sealed and saved.step == 4
    second = start("holdfast", tmp_path, *arguments, flags=("--on-fault", "job"), ranks=2)
    assert second.code == 0 and "resumed at step 4 " in second.output, second.output
    assert second.digests == bare("ddp", 2).digests


@pytest.mark.more
def test_torchrun_starts_all_ranks_again(tmp_path: Path, bare: Callable[[str], Result]) -> None:
    """torchrun makes a second attempt, which continues from the last-gasp checkpoint of the first."""
    arguments = ("--layout", "hsdp", "--checkpoint", str(tmp_path / "ckpts"), "--die", "0@5")
    got = start("torchrun", tmp_path, *arguments, flags=("--max-restarts", "2"))
    assert got.code == 0, got.output
    assert "resumed at step 5" in got.output
    assert got.digests == bare("hsdp").digests


@pytest.mark.more
def test_plain_torchrun_gets_a_last_gasp(tmp_path: Path, bare: Callable[..., Result]) -> None:
    """Two ranks suffice: under torchrun each rank imports torch, in both starts."""
    root = tmp_path / "ckpts"
    arguments = ("--layout", "ddp", "--checkpoint", str(root), "--die", "0@5")
    first = start("torchrun", tmp_path, *arguments, ranks=2)
    assert first.code != 0
    (saved,) = Root(root).list()
    assert saved.valid and saved.step == 5, first.output
    assert saved.save_id is not None and saved.save_id.kind == "last-gasp"
    second = start("torchrun", tmp_path, *arguments, ranks=2)
    assert second.code == 0, second.output
    assert second.digests == bare("ddp", 2).digests
