"""``HOLDFAST_DISABLE=1``: the script runs without Holdfast, or not at all."""

from __future__ import annotations

from pathlib import Path

import click
import pytest

from holdfast.cli.commands.run import run
from holdfast.cli.start.flag_files import settle
from holdfast.cli.start.torchrun_fallback import torchrun_command
from holdfast.errors import UnsupportedError, UsageError
from holdfast.runtime.node.disabled import DISABLE_VARIABLE, is_disabled
from holdfast.session.session import Session
from tests.cli.command import Run


def command(directory: Path, *args: str) -> list[str]:
    context: click.Context = run.make_context("run", [*args])
    values = {key: value for key, value in context.params.items() if key not in ("script", "args")}
    settled = settle(context, values, directory)
    return torchrun_command(settled, context.params["script"], context.params["args"])


def test_torchrun_gets_its_own_flags(tmp_path: Path) -> None:
    (tmp_path / "holdfast.toml").write_text("max-restarts = 2\nmodule = false")
    made = command(
        tmp_path, "--nproc-per-node", "2", "--spares", "1", "--standalone", "train.py", "--lr", "1"
    )
    assert made[1:] == [
        "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone", "--max-restarts=2", "train.py",
        "--lr", "1",
    ]  # fmt: skip
    with pytest.raises(UsageError, match="has no launcher"):
        command(tmp_path, "--framework", "mindspore", "train.py")


def test_the_script_runs_without_a_run(holdfast: Run, tmp_path: Path) -> None:
    stub = tmp_path / "stub/torch/distributed"
    stub.mkdir(parents=True)
    for package in (stub, stub.parent):
        (package / "__init__.py").touch()
    (stub / "run.py").write_text("import sys; print('torchrun', *sys.argv[1:]); sys.exit(5)")
    (tmp_path / "train.py").touch()
    env = {DISABLE_VARIABLE: "1", "PYTHONPATH": str(tmp_path / "stub")}
    result = holdfast("run", "--spares", "1", "train.py", "--lr", "1", env=env)
    assert result.returncode == 5 and result.stdout == "torchrun train.py --lr 1\n"
    assert "torchrun runs the script, and no fault is survived; --spares" in result.stderr
    assert not (tmp_path / "runs").exists()


def test_no_session_opens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(DISABLE_VARIABLE, "1")
    with pytest.raises(UnsupportedError, match="neither saved nor resumed"):
        object.__new__(Session).__enter__()


@pytest.mark.parametrize(("said", "means"), [("1", True), ("on", True), ("0", False), ("", False)])
def test_what_the_variable_may_say(monkeypatch: pytest.MonkeyPatch, said: str, means: bool) -> None:
    monkeypatch.setenv(DISABLE_VARIABLE, said)
    assert is_disabled() is means


def test_another_word_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(DISABLE_VARIABLE, "maybe")
    with pytest.raises(UsageError, match="neither 1 nor 0"):
        is_disabled()
