"""Scripts in unusual styles: after a kill, the end is that of the undisturbed run, or the script is refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from holdfast.exit_codes import Exit
from tests.session.launch import run_job
from tests.session.odd_job import STEPS

pytestmark = [pytest.mark.torch, pytest.mark.processes]

JOB = str(Path(__file__).with_name("odd_job.py"))


class Calm(NamedTuple):
    """The results of each rank of an undisturbed run, and the output."""

    told: list[dict[str, Any]]
    output: str


def run(
    where: Path, what: str, *kills: str, flags: tuple[str, ...] = ()
) -> tuple[int, str, list[dict[str, Any]]]:
    """Run a job. Return exit code, output, and the results of each of three workers."""
    where.mkdir(exist_ok=True)
    done = run_job(where, 3, *flags, JOB, "--what", what, "--kill", ",".join(kills), "--result", "result")
    told = [json.loads(path.read_text()) for path in sorted(where.glob("result/rank-*.json"))]
    assert {path.name for path in where.glob("struck-*")} == {f"struck-{kill}" for kill in kills}, done.stdout
    return done.returncode, done.stdout, told


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Calm]:
    """Return the undisturbed run of a way, started once."""
    known: dict[str, Calm] = {}

    def ran(what: str) -> Calm:
        if what not in known:
            code, output, told = run(tmp_path_factory.mktemp("calm"), what)
            assert code == 0, output
            known[what] = Calm(told, output)
        return known[what]

    return ran


def test_undisturbed_the_first_block_alone_runs_again_for_its_check(calm: Callable[[str], Calm]) -> None:
    assert [rank["blocks"] for rank in calm("plain").told] == [[0, 0, *range(STEPS)]] * 3


@pytest.mark.parametrize(
    ("what", "kills"),
    [
        # Each has its own job: DDP assigns its buckets again after the first step, and after a recovery.
        pytest.param("plain", ["1:0:end"], marks=pytest.mark.more),
        pytest.param("plain", ["1:0:after"], marks=pytest.mark.more),
        pytest.param("plain", ["1:1:start"], marks=pytest.mark.more),
        pytest.param("plain", ["0:1:mid"], marks=pytest.mark.more),
        pytest.param("plain", ["1:1:after"], marks=pytest.mark.more),
        pytest.param("plain", ["1:2:mid"], marks=pytest.mark.more),
        pytest.param("plain", ["1:3:end"], marks=pytest.mark.more),
        pytest.param("late", ["1:1:begin"], marks=pytest.mark.more),
        pytest.param("late", ["0:3:mid"], marks=pytest.mark.more),
        ("skipping", ["1:7:begin", "1:8:begin"]),
        ("between", ["1:7:mid", "0:7:after"]),
        pytest.param("inside", ["1:5:mid", "1:6:after"], marks=pytest.mark.more),
        pytest.param("measuring", ["1:7:mid"], marks=pytest.mark.more),
        pytest.param("evaluating", ["1:7:after", "0:8:mid"], marks=pytest.mark.more),
        pytest.param("evaluating", ["2:8:evaluation", "2:9:start"], marks=pytest.mark.more),
        pytest.param("averaging", ["1:0:late", "0:6:mid", "2:11:late"], marks=pytest.mark.more),
        pytest.param("owning", ["1:5:mid", "0:7:begin", "2:9:after"], marks=pytest.mark.more),
        pytest.param("stopping", ["1:9:left"], marks=pytest.mark.more),
        ("changing", ["1:7:mid", "0:7:end", "2:8:after"]),
        pytest.param("changing", ["1:0:mid"], marks=pytest.mark.more),
        pytest.param("streaming", ["1:6:mid", "0:6:update", "2:6:after"], marks=pytest.mark.more),
        pytest.param("swapping", ["1:5:evaluation"], marks=pytest.mark.more),
        pytest.param("swapping", ["2:8:validation"], marks=pytest.mark.more),
    ],
    ids=lambda value: value if isinstance(value, str) else ",".join(value),
)
def test_kills_leave_the_bits_as_they_are(
    tmp_path: Path, calm: Callable[[str], Calm], what: str, kills: list[str]
) -> None:
    code, output, told = run(tmp_path / "job", what, *kills)
    assert code == 0, output
    undisturbed = calm(what).told
    assert [rank["digest"] for rank in told] == [rank["digest"] for rank in undisturbed], output
    assert [rank.get("drawn") for rank in told] == [rank.get("drawn") for rank in undisturbed]
    (log,) = (tmp_path / "job").glob("runs/*/events.jsonl")
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    recovered = [e["data"]["steps_lost"] for e in lines if e["kind"] == "recovered"]
    assert recovered == [0] * len(kills), output
    assert {e["data"]["steps_lost"] for e in lines if e["kind"] == "restored"} == {0}, output


@pytest.mark.parametrize(
    "kills",
    [
        ["1:5:mid", "0:7:before", "2:9:after"],
        pytest.param(["0:6:start", "1:6:end", "2:8:before"], marks=pytest.mark.more),
    ],
    ids=",".join,
)
def test_a_rate_that_is_set_before_the_block_costs_no_restart(
    tmp_path: Path, calm: Callable[[str], Calm], kills: list[str]
) -> None:
    """Regression: survivors whose state had changed before the block gave none of it, so all ranks started again."""
    code, output, told = run(tmp_path / "job", "adjusting", *kills)
    assert code == 0 and output.count(": replace, training continues") == len(kills), output
    assert "restart" not in output and ", 3 faults, 0 steps lost" in output, output
    assert [rank["digest"] for rank in told] == [rank["digest"] for rank in calm("adjusting").told], output


@pytest.mark.parametrize(
    ("what", "fault", "changed"),
    [
        ("moving", "1:7:cut", "lr of group 0"),
        ("passing", "1:7:cut", "buffer 1."),
        pytest.param("moving", "1:7:mid", "lr of group 0", marks=pytest.mark.more),
    ],
)
def test_code_before_a_block_that_changes_the_state_twice_is_refused_by_name(
    tmp_path: Path, what: str, fault: str, changed: str
) -> None:
    """Regression: after cut connections all ranks ran this code again, and continued with another state.

    After a kill, the check of the newcomer's first block may come before that of the survivors.
    """
    code, output, told = run(tmp_path / "job", what, fault)
    assert code == Exit.BAD_INPUT and not told and changed in output, output
    error = "step 7: the code before the block has run again after a fault, and has changed "
    assert f"{error}{changed}" in output or fault.endswith("mid"), output


@pytest.mark.more
@pytest.mark.parametrize(
    "flags",
    [pytest.param((), id="resumed"), pytest.param(("--spares", "1"), id="spare", marks=pytest.mark.more)],
)
def test_a_block_that_changes_its_batch_finds_it_whole_again(
    tmp_path: Path, calm: Callable[[str], Calm], monkeypatch: pytest.MonkeyPatch, flags: tuple[str, ...]
) -> None:
    """The block runs first in the rehearsal of a resume, or of a spare."""
    kills = ["1:9:mid"] if flags else []
    if not flags:
        monkeypatch.setenv("UNTIL", "8")
        code, output, _ = run(tmp_path / "job", "changing")
        assert code == 0, output
        monkeypatch.delenv("UNTIL")
    code, output, told = run(tmp_path / "job", "changing", *kills, flags=flags)
    assert code == 0 and ("resumed at step 8" in output or flags), output
    for rank, undisturbed in zip(told, calm("changing").told, strict=True):
        assert (rank["digest"], rank["drawn"]) == (undisturbed["digest"], undisturbed["drawn"]), output


@pytest.mark.more
def test_a_survivor_that_takes_long_before_its_block_stays(
    tmp_path: Path, calm: Callable[[str], Calm]
) -> None:
    """The survivor gets requests for its digests and its state, and both wait for the script."""
    code, output, told = run(tmp_path / "job", "resting", "1:7:start")
    assert code == 0 and "did not give its state" not in output, output
    assert ", 1 fault, 0 steps lost" in output, output
    assert [rank["digest"] for rank in told] == [rank["digest"] for rank in calm("plain").told], output


@pytest.mark.more
def test_survivors_in_a_long_update_stay(tmp_path: Path, calm: Callable[[str], Calm]) -> None:
    # Another step takes a few milliseconds: even a thousand of them may be shorter than the long update.
    code, output, told = run(tmp_path / "job", "updating", "1:8:update", flags=("--hang-factor", "1e6"))
    assert code == 0 and "did not settle" not in output, output
    assert ", 1 fault, 0 steps lost" in output, output
    assert [rank["digest"] for rank in told] == [rank["digest"] for rank in calm("plain").told], output


@pytest.mark.parametrize(
    "kills",
    [
        pytest.param(["1:8:mid", "2:10:start"], id="mid, start"),
        pytest.param(["0:9:end"], id="end", marks=pytest.mark.more),
    ],
)
def test_what_comes_before_a_block_is_done_again_by_all_or_none(
    tmp_path: Path, calm: Callable[[str], Calm], kills: list[str]
) -> None:
    """All ranks start again and evaluate together, or go back to a kept state without an evaluation on the way."""
    code, output, told = run(tmp_path / "job", "evaluating_shards", *kills)
    assert code == 0 and ", 0 steps lost" in output, output
    for rank, undisturbed in zip(told, calm("evaluating_shards").told, strict=True):
        assert (rank["digest"], rank["drawn"]) == (undisturbed["digest"], undisturbed["drawn"]), output


@pytest.mark.parametrize(
    ("what", "why", "advice"),
    [
        ("accumulating", "step 0 made no update but leaves gradients", "do so inside one block"),
        ("keeping", "step 0 leaves the gradients of its update", "call optimizer.zero_grad() in each block"),
        ("caught", "step 2 was left by a ValueError that the script caught", "catch it inside the block"),
        ("searching", "LBFGS evaluates its closure several times in one step()", "train with one process"),
    ],
)
def test_what_cannot_be_exact_is_refused_by_name(tmp_path: Path, what: str, why: str, advice: str) -> None:
    code, output, told = run(tmp_path / "job", what)
    assert code != 0 and not told, output
    assert why in output and advice in output


def test_a_newcomer_that_computes_in_another_type_is_refused(tmp_path: Path) -> None:
    """The types have the same size. Regression: the newcomer took bfloat16 for float16, and trained."""
    code, output, told = run(tmp_path / "job", "casting", "1:5:mid")
    assert code != 0 and not told, output
    assert "0.weight is BF16 [64, 16] in the survivors, and F16 [64, 16] in this process" in output, output


def test_a_script_that_leaves_between_two_steps_has_ended(tmp_path: Path) -> None:
    code, output, _ = run(tmp_path, "leaving")
    assert code == 0 and "the job ran to its end (step 5, " in output, output
    assert [path.name.split(".")[0] for path in (tmp_path / "ckpt").iterdir()] == ["step-00000005"], output


def test_state_that_depends_on_an_unsaved_count_is_named_after_a_recovery(tmp_path: Path) -> None:
    """Regression: it was named only at the end of the job, weeks later."""
    _, output, _ = run(tmp_path, "alternating", "1:5:mid")
    assert output.count('state "average" is not the same on all ranks since a recovery') == 1, output
    assert output.count("is not the same on all ranks") == 1, output


@pytest.mark.more
def test_state_that_depends_on_an_unsaved_count_is_not_named_without_a_fault(
    calm: Callable[[str], Calm],
) -> None:
    assert "is not the same on all ranks" not in calm("alternating").output


def test_state_that_is_not_the_same_everywhere_is_told_once(calm: Callable[[str], Calm]) -> None:
    output = calm("owning").output
    assert output.count('state "wrong" is not the same on all ranks') == 1, output
    assert 'state "right"' not in output
    assert output.count("not the same on all ranks: 1 buffer, mine first") == 1, output


def test_a_division_that_a_fault_would_change_is_warned_of(tmp_path: Path) -> None:
    code, output, _ = run(tmp_path / "job", "viewing")
    assert code == 0 and output.count("after a fault the last bits may differ; zero_grad() is exact") == 1, (
        output
    )


@pytest.mark.parametrize(
    "arguments",
    [("receive",), pytest.param(("receive", "0"), marks=pytest.mark.more),
     ("sum",), pytest.param(("sum", "0"), marks=pytest.mark.more)],
    ids=" ".join,
)  # fmt: skip
def test_communication_that_a_block_begins_for_the_next_one_is_refused(
    tmp_path: Path, arguments: tuple[str, ...]
) -> None:
    """Regression: the next block trained with the data of one rank, after its rehearsal or after a recovery."""
    done = run_job(tmp_path, 2, str(Path(__file__).with_name("prefetch_job.py")), *arguments)
    assert done.returncode == Exit.BAD_INPUT, done.stdout
    assert "was begun before this block" in done.stdout
    assert "call wait() before the end of the block" in done.stdout
