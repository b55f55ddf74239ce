"""The code after a block belongs to the step: the end is that of the undisturbed run, whichever process joins later."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.session.launch import run_job

pytestmark = [pytest.mark.torch, pytest.mark.processes]

JOB = str(Path(__file__).with_name("behind_job.py"))
Calm = Callable[..., list[str]]


def run(where: Path, *arguments: str, flags: tuple[str, ...] = ()) -> tuple[int, str, list[str]]:
    """Run the job. Return exit code, output, and the results of each of two workers."""
    where.mkdir(exist_ok=True)
    done = run_job(where, 2, *flags, JOB, *arguments, "--result", "result")
    return done.returncode, done.stdout, [json.loads(p.read_text()) for p in sorted(where.glob("result/*"))]


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Calm:
    """Return the results of the undisturbed run."""
    known: dict[tuple[str, ...], list[str]] = {}

    def told(*arguments: str) -> list[str]:
        if arguments not in known:
            code, output, known[arguments] = run(tmp_path_factory.mktemp("calm"), *arguments)
            assert code == 0, output
        return known[arguments]

    return told


@pytest.mark.parametrize(
    ("arguments", "kill"),
    [
        pytest.param((), "1:7:behind", marks=pytest.mark.more),
        pytest.param((), "0:7:end", marks=pytest.mark.more),
        (("--layout", "fsdp"), "1:7:behind"),
        pytest.param(("--layout", "fsdp"), "0:8:mid", marks=pytest.mark.more),
        pytest.param(("--layout", "fsdp"), "1:9:mid", marks=pytest.mark.more),
        pytest.param(("--loops",), "1:8:behind", marks=pytest.mark.more),
    ],
)
def test_a_kill_leaves_the_bits_as_they_are(
    tmp_path: Path, calm: Calm, arguments: tuple[str, ...], kill: str
) -> None:
    code, output, told = run(tmp_path / "job", *arguments, "--kill", kill)
    assert code == 0 and (tmp_path / "job/struck").exists(), output
    assert told == calm(*arguments), output
    assert "wrong copy" not in output, output
    if "fsdp" not in arguments:
        assert ", 0 steps lost" in output, output


@pytest.mark.more
def test_what_came_before_a_loop_is_in_what_all_start_again_from_in_it(tmp_path: Path, calm: Calm) -> None:
    """The survivors have entered the next loop. The changes on the way there are neither repeated nor undone."""
    kill = ("--loops", "--kill", "1:8:behind")
    code, output, told = run(tmp_path, *kill, flags=("--on-fault", "restart"))
    assert code == 0 and "restart last gasp" in output, output
    assert told == calm("--loops"), output


@pytest.mark.more
def test_a_periodic_save_has_what_the_script_did_behind_the_block(tmp_path: Path, calm: Calm) -> None:
    code, output, _ = run(tmp_path, "--checkpoint", "first", "--pause-s", "1")  # gives the disk time
    assert code == 0, output
    code, output, told = run(tmp_path, "--resume", "first@8", "--checkpoint", "second")
    assert code == 0 and "resumed at step 8" in output, output
    assert told == calm(), output


@pytest.mark.more
def test_a_save_that_a_break_leaves_behind_is_made_at_the_next_step(tmp_path: Path, calm: Calm) -> None:
    """A resumed process runs the code after the loop again, so the save must not contain the changes of that code."""
    arguments = ("--loops", "--leave", "7")
    code, output, told = run(tmp_path, *arguments, "--checkpoint", "first", "--pause-s", "1")
    assert code == 0 and told == calm("--loops"), output
    names = sorted(path.name[:13] for path in (tmp_path / "first").glob("step-*"))
    assert names == ["step-00000009", "step-00000016"]
    code, output, told = run(tmp_path, *arguments, "--resume", "first@9", "--checkpoint", "second")
    assert code == 0 and "resumed at step 9" in output, output
    assert told == calm("--loops"), output


@pytest.mark.more
@pytest.mark.parametrize("layout", ["ddp", pytest.param("fsdp", marks=pytest.mark.more)])
def test_a_graceful_exit_has_it_too(tmp_path: Path, calm: Calm, layout: str) -> None:
    code, output, told = run(tmp_path, "--layout", layout, "--kill", "0:7:term")
    assert code == 75 and not told, output
    code, output, told = run(tmp_path, "--layout", layout)
    assert code == 0 and "resumed at step 8" in output, output
    assert told == (calm() if layout == "ddp" else calm("--layout", "fsdp")), output


@pytest.mark.more
def test_a_script_that_does_not_come_back_is_not_waited_for(tmp_path: Path) -> None:
    """All ranks start again from one state, and a message names the code that is not repeated."""
    code, output, told = run(tmp_path, "--kill", "1:7:behind", "--pause-s", "3", "--patience-s", "0.2")
    assert code == 0 and "code after the block of step 7 has run for 0.2 s" in output, output
    assert len(set(told)) == 1 and "wrong copy" not in output, output
