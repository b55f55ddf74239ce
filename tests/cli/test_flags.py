"""The flags of ``holdfast run``, compared with torchrun's own parser and with the document."""

from __future__ import annotations

import argparse
import os
import subprocess
from pathlib import Path

import pytest

from holdfast.cli.commands.run import run
from holdfast.cli.start.flags import FLAGS, RunFlag
from holdfast.cli.start.help_pages import COMMON, TOPICS
from tests.cli.command import HOLDFAST, Run

ROOT = Path(__file__).resolve().parents[2]
IDS = [f.name for f in FLAGS]
NEWER = {"log_line_prefix_template", "print_completion"}
"""Flags of torchrun that it has from 2.14 on; the oldest torch that is tested lacks them."""


def torch_actions() -> list[argparse.Action]:
    """Return the flags of the installed torchrun."""
    parser: argparse.ArgumentParser = pytest.importorskip("torch.distributed.run").get_args_parser()
    return [a for a in parser._actions if a.option_strings and "--help" not in a.option_strings]


@pytest.mark.torch
def test_every_flag_of_torchrun_is_known() -> None:
    theirs = {action.dest: set(action.option_strings) for action in torch_actions()}
    ours = {flag.key: set(flag.spellings) for flag in FLAGS if not flag.ours}
    assert ours.keys() - theirs.keys() in (set(), NEWER)
    assert {key: ours[key] for key in theirs} == theirs


@pytest.mark.torch
def test_flags_take_values_where_torchrun_takes_them() -> None:
    switches = {action.dest for action in torch_actions() if action.nargs == 0}
    assert {flag.key for flag in FLAGS if flag.kind == "switch" and not flag.ours} == switches


@pytest.mark.torch
def test_variables_are_those_of_torchrun() -> None:
    theirs = {a.dest for a in torch_actions() if type(a).__name__ in ("env", "check_env")}
    ours = {flag.key for flag in FLAGS if flag.variable and not flag.ours}
    assert theirs | (ours & NEWER) == ours
    assert all(f.variable == f"PET_{f.key.upper()}" for f in FLAGS if f.variable and not f.ours)


@pytest.mark.torch
def test_our_own_flags_do_not_hide_one_of_torchrun() -> None:
    theirs = {option for action in torch_actions() for option in action.option_strings}
    assert theirs.isdisjoint(option for flag in FLAGS if flag.ours for option in flag.spellings)


@pytest.mark.torch
@pytest.mark.parametrize(
    "words",
    [
        "t.py -- --width x",
        "-m package.module -- --width x",
        "t.py --width x -- y",
        "t.py x -- --width",
        "t.py -- -- x",
        "-- t.py --width",
        "t.py --nnodes 2",
        "t.py",
    ],
)
def test_the_script_gets_the_arguments_that_torchrun_gives_it(words: str) -> None:
    """Regression: ``--`` after the script reached the script, which refused what came after it."""
    theirs = pytest.importorskip("torch.distributed.run").get_args_parser().parse_args(words.split())
    ours = run.make_context("run", words.split()).params
    assert (ours["script"], list(ours["args"])) == (theirs.training_script, theirs.training_script_args)


def test_document_holds_the_table() -> None:
    lines = (ROOT / "docs" / "run-flags.md").read_text().splitlines()
    assert [line for line in lines if line.startswith("| `")] == [flag.row() for flag in FLAGS]


def test_help_names_every_flag(holdfast: Run) -> None:
    result = holdfast("run", "--help")
    assert result.returncode == 0
    assert [f.name for f in FLAGS if f.name not in result.stdout] == []
    assert result.stdout.index("Examples:") < result.stdout.index("--nproc-per-node N")
    placed = [key for _, keys in TOPICS for key in keys]
    assert sorted(placed) == sorted(flag.key for flag in FLAGS if flag.use == "used"), "each once"
    assert len(COMMON) == 6


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish", "tcsh"])
def test_what_a_shell_reads_to_complete_the_command(shell: str, holdfast: Run, tmp_path: Path) -> None:
    result = holdfast("run", "--print-completion", shell)
    assert (result.returncode, result.stderr) == (0, "")
    assert "holdfast" in result.stdout
    if shell == "tcsh":
        assert "nproc-per-node" in result.stdout and "ranktable" in result.stdout
    elif shell == "bash":
        (tmp_path / "script").write_text(result.stdout)
        typed = (
            "source ./script; COMP_WORDS=(holdfast run --log-l); COMP_CWORD=2; _holdfast_completion holdfast"
        )
        path = f"{Path(HOLDFAST).parent}:{os.environ['PATH']}"
        shown = subprocess.run(
            ["bash", "-c", f"{typed}; echo ${{COMPREPLY[@]}}"],
            cwd=tmp_path, env={**os.environ, "PATH": path}, capture_output=True, text=True, check=True,
        )  # fmt: skip
        assert shown.stdout == "--log-line-prefix-template\n"


def test_another_shell_is_answered_with_the_known_ones(holdfast: Run) -> None:
    result = holdfast("run", "--print-completion", "ksh")
    assert result.returncode == 2 and "bash, zsh, fish, tcsh" in result.stderr


def as_arguments(flag: RunFlag, spelling: str) -> list[str]:
    """Return the flag as typed, with a value if it takes one."""
    values = {"text": "1", "whole": "1", "number": "1", "switch": ""}
    return [spelling] if flag.kind == "switch" else [spelling, values[flag.kind]]


@pytest.mark.parametrize("flag", [f for f in FLAGS if f.use == "refused"], ids=lambda f: f.name)
def test_refused_flags_say_their_name_and_the_reason(flag: RunFlag, holdfast: Run, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("print('started')\n")
    result = holdfast("run", *as_arguments(flag, flag.spellings[-1]), "train.py")
    assert result.returncode == 2, result.stderr
    assert f"error: {flag.name} is not supported: {flag.about}" in result.stderr
    assert f"next: leave {flag.name} out" in result.stderr
    assert not (tmp_path / "runs").exists()
