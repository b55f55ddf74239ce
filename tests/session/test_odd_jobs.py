"""Scripts that are written in unusual ways: bit for bit the undisturbed run after a kill, or refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.session.launch import run_job
from tests.session.odd_job import STEPS

pytestmark = [pytest.mark.torch, pytest.mark.processes]

JOB = str(Path(__file__).with_name("odd_job.py"))
Calm = Callable[[str], list[dict[str, Any]]]


def run(where: Path, what: str, kill: str = "") -> tuple[int, str, list[dict[str, Any]]]:
    """Exit code, output, and what each of three workers told."""
    where.mkdir(exist_ok=True)
    done = run_job(where, 3, JOB, "--what", what, "--kill", kill, "--result", "result")
    told = [json.loads(path.read_text()) for path in sorted(where.glob("result/rank-*.json"))]
    assert (where / "struck").exists() == bool(kill), done.stdout
    return done.returncode, done.stdout, told


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Calm:
    """The undisturbed run of a way, started once."""
    known: dict[str, list[dict[str, Any]]] = {}

    def told(what: str) -> list[dict[str, Any]]:
        if what not in known:
            code, output, known[what] = run(tmp_path_factory.mktemp("calm"), what)
            assert code == 0, output
        return known[what]

    return told


def test_undisturbed_each_block_runs_once(calm: Calm) -> None:
    assert [rank["blocks"] for rank in calm("plain")] == [list(range(STEPS))] * 3


@pytest.mark.parametrize(
    ("what", "kill"),
    [
        ("plain", "1:0:end"),
        ("plain", "1:0:after"),
        ("plain", "1:1:start"),
        ("plain", "0:1:mid"),
        ("plain", "1:1:after"),
        ("plain", "1:2:mid"),
        ("plain", "1:3:end"),
        ("skipping", "1:7:begin"),
        ("skipping", "1:8:begin"),
        ("late", "1:1:begin"),
        ("late", "0:3:mid"),
        ("between", "1:7:mid"),
        ("between", "0:7:after"),
        ("inside", "1:5:mid"),
        ("inside", "1:6:after"),
        ("measuring", "1:7:mid"),
        ("evaluating", "0:8:mid"),
        ("evaluating", "2:9:start"),
        ("evaluating", "1:7:after"),
        ("evaluating", "2:8:evaluation"),
        ("averaging", "1:0:late"),
        ("averaging", "0:6:mid"),
        ("averaging", "2:11:late"),
        ("owning", "1:5:mid"),
        ("owning", "0:7:begin"),
        ("owning", "2:9:after"),
        ("streaming", "0:6:update"),
        ("streaming", "1:6:mid"),
        ("streaming", "2:6:after"),
    ],
)
def test_a_kill_leaves_the_bits_as_they_are(tmp_path: Path, calm: Calm, what: str, kill: str) -> None:
    code, output, told = run(tmp_path / "job", what, kill)
    assert code == 0, output
    assert [rank["digest"] for rank in told] == [rank["digest"] for rank in calm(what)], output
    assert [rank.get("drawn") for rank in told] == [rank.get("drawn") for rank in calm(what)]
    (log,) = (tmp_path / "job").glob("runs/*/events.jsonl")
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert {e["data"]["steps_lost"] for e in lines if e["kind"] == "restored"} == {0}, output


@pytest.mark.parametrize("kill", ["1:8:mid", "0:9:end", "2:10:start"])
def test_what_comes_before_a_block_is_done_again_by_all_or_none(
    tmp_path: Path, calm: Calm, kill: str
) -> None:
    """All go back to a kept state: over an evaluation, or not."""
    code, output, told = run(tmp_path / "job", "evaluating_shards", kill)
    assert code == 0 and "from memory" in output, output
    for rank, undisturbed in zip(told, calm("evaluating_shards"), strict=True):
        assert (rank["digest"], rank["drawn"]) == (undisturbed["digest"], undisturbed["drawn"]), output


@pytest.mark.parametrize(
    ("what", "why", "advice"),
    [
        ("accumulating", "step 0 made no update but leaves gradients", "accumulate inside one block"),
        ("caught", "step 2 was left by a ValueError that the script caught", "catch it inside the block"),
        ("searching", "LBFGS evaluates its closure several times in one step()", "train with one process"),
    ],
)
def test_what_cannot_be_exact_is_refused_by_name(tmp_path: Path, what: str, why: str, advice: str) -> None:
    code, output, told = run(tmp_path / "job", what)
    assert code != 0 and not told, output
    assert why in output and advice in output


def test_state_that_is_not_the_same_everywhere_is_told_once(calm: Calm, tmp_path: Path) -> None:
    code, output, _ = run(tmp_path / "job", "owning")
    assert code == 0 and output.count('state "wrong" is not the same on all ranks') == 1, output
    assert 'state "right"' not in output
    assert output.count("not the same on all ranks: 1 buffer, mine first") == 1, output


def test_a_division_that_a_fault_would_change_is_warned_of(tmp_path: Path) -> None:
    code, output, _ = run(tmp_path / "job", "viewing")
    assert code == 0 and output.count("after a fault the last bits may differ; zero_grad() is exact") == 1, (
        output
    )
