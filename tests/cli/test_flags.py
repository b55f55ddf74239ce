"""The flags of ``holdfast run`` against torchrun's own parser and against the document."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from holdfast.cli.flags import FLAGS, Flag
from tests.cli.command import Run

ROOT = Path(__file__).resolve().parents[2]
IDS = [f.name for f in FLAGS]


def torch_actions() -> list[argparse.Action]:
    """The flags of the installed torchrun."""
    run = pytest.importorskip("torch.distributed.run")
    parser: argparse.ArgumentParser = run.get_args_parser()
    return [a for a in parser._actions if a.option_strings and "--help" not in a.option_strings]


@pytest.mark.torch
def test_every_flag_of_torchrun_is_known() -> None:
    theirs = {action.dest: set(action.option_strings) for action in torch_actions()}
    ours = {flag.key: set(flag.spellings) for flag in FLAGS if not flag.ours}
    assert ours == theirs


@pytest.mark.torch
def test_flags_take_values_where_torchrun_takes_them() -> None:
    switches = {action.dest for action in torch_actions() if action.nargs == 0}
    assert {flag.key for flag in FLAGS if flag.kind == "switch"} == switches


@pytest.mark.torch
def test_variables_are_those_of_torchrun() -> None:
    theirs = {a.dest for a in torch_actions() if type(a).__name__ in ("env", "check_env")}
    assert {flag.key for flag in FLAGS if flag.variable and not flag.ours} == theirs
    assert all(f.variable == f"PET_{f.key.upper()}" for f in FLAGS if f.variable and not f.ours)


@pytest.mark.torch
def test_our_own_flags_do_not_hide_one_of_torchrun() -> None:
    theirs = {option for action in torch_actions() for option in action.option_strings}
    assert theirs.isdisjoint(option for flag in FLAGS if flag.ours for option in flag.spellings)


def test_document_holds_the_table() -> None:
    lines = (ROOT / "docs" / "run-flags.md").read_text().splitlines()
    assert [line for line in lines if line.startswith("| `")] == [flag.row() for flag in FLAGS]


def test_help_names_every_flag(holdfast: Run) -> None:
    result = holdfast("run", "--help")
    assert result.returncode == 0
    assert [f.name for f in FLAGS if f.name not in result.stdout] == []


def as_arguments(flag: Flag, spelling: str) -> list[str]:
    """The flag as typed, with a value where it takes one."""
    values = {"text": "1", "whole": "1", "number": "1", "switch": ""}
    return [spelling] if flag.kind == "switch" else [spelling, values[flag.kind]]


@pytest.mark.parametrize("flag", [f for f in FLAGS if f.use == "refused"], ids=lambda f: f.name)
def test_refused_flags_say_their_name_and_the_reason(flag: Flag, holdfast: Run, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("print('started')\n")
    result = holdfast("run", *as_arguments(flag, flag.spellings[-1]), "train.py")
    assert result.returncode == 2, result.stderr
    assert f"error: {flag.name} is not supported: {flag.about}" in result.stderr
    assert f"next: leave {flag.name} out" in result.stderr
    assert not (tmp_path / "runs").exists()
