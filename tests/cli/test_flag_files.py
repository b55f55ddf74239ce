"""Flags of ``holdfast run`` from files, and the sources that override them."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.cli.commands.run import run
from holdfast.cli.start.flag_files import FlagValues, explanation, settle
from holdfast.errors import UsageError
from tests.cli.command import Run


def settled(directory: Path, *args: str) -> FlagValues:
    context = run.make_context("run", [*args])
    keys = set(context.params) - {"script", "args"}
    return settle(context, {key: context.params[key] for key in keys}, directory)


def written(directory: Path, own: str = "", project: str = "") -> Path:
    (directory / "holdfast.toml").write_text(own)
    (directory / "pyproject.toml").write_text(project)
    return directory


def test_the_better_place_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PET_MAX_RESTARTS", "3")
    place = written(
        tmp_path,
        own="nproc-per-node = 2\nmax_restarts = 4\nspares = 1\nmodule = true\nhang-floor = 2",
        project='[tool.holdfast]\nspares = 5\nrole = "trainer"\n[tool.other]\nspares = 7',
    )
    found = settled(place, "--nproc-per-node", "8", "train.py")
    values = found.values
    assert (values["nproc_per_node"], values["max_restarts"], values["spares"]) == ("8", 3, 1)
    assert (values["role"], values["module"], values["hang_floor"]) == ("trainer", True, 2.0)
    rows = {name: (value, source) for name, value, source in explanation(found)}
    assert rows["--nproc-per-node"] == ("8", "command line, over holdfast.toml")
    assert rows["--max-restarts"] == ("3", "PET_MAX_RESTARTS, over holdfast.toml")
    assert rows["--spares"] == ("1", "holdfast.toml, over pyproject.toml")
    assert rows["--role"] == ("trainer", "pyproject.toml")
    assert rows["--grace-s"] == ("300.0", "default")
    assert "spares" in found.given and "grace_s" not in found.given
    assert found.notes == (
        "holdfast.toml sets --module, --spares, --hang-floor", "pyproject.toml sets --role",
    )  # fmt: skip


def test_two_flags_that_say_the_same_are_one(tmp_path: Path) -> None:
    place = written(
        tmp_path,
        own='grace-s = 10\nmaster-addr = "10.0.0.1"',
        project="[tool.holdfast]\nshutdown-timeout = 20",
    )
    assert "shutdown_timeout" not in settled(place).given
    found = settled(place, "--shutdown-timeout", "5", "--rdzv-endpoint", "a:1")
    assert not found.given & {"grace_s", "master_addr"}


@pytest.mark.parametrize(
    ("text", "says", "hint"),
    [
        (
            "nproc-pernode = 2",
            "nproc-pernode is no flag that a file can set; did you mean nproc-per-node?",
            "--help",
        ),
        ("explain = true", "explain is no flag that a file can set", "--help"),
        ("[run]\nspares = 1", "run is no flag that a file can set", "--help"),
        ('spares = "two"', "spares = 'two' is not a whole number", "spares = 1"),
        ("spares = true", "spares = True is not a whole number", "spares = 1"),
        ("hang-floor = nan", "is not a number", "hang-floor = 1.5"),
        ("module = 1", "module = 1 is not true or false", "module = true"),
        ("run-id = ['a']", "is not a text", "run-id"),
        ("spares = 1\nno-python = false\nno_python = true", "both spellings", "leave one of them out"),
        ("spares =", "is no TOML", "correct that line"),
    ],
)
def test_what_no_file_can_say(tmp_path: Path, text: str, says: str, hint: str) -> None:
    with pytest.raises(UsageError, match=r"holdfast\.toml") as error:
        settled(written(tmp_path, own=text))
    assert says in error.value.message and hint in error.value.hint


def test_a_project_without_a_table_of_ours_sets_nothing(tmp_path: Path) -> None:
    assert settled(written(tmp_path, project='[project]\nname = "x"')).given == frozenset()
    with pytest.raises(UsageError, match="no table"):
        settled(written(tmp_path, project="[tool]\nholdfast = 1"))


def test_the_command_reads_the_files_of_its_directory(holdfast: Run, tmp_path: Path) -> None:
    written(tmp_path, own="spares = 2")
    result = holdfast("run", "--explain")
    head, first, *_ = result.stdout.splitlines()
    assert head.split() == ["flag", "value", "from"] and first.split() == ["--spares", "2", "holdfast.toml"]
    assert result.returncode == 0 and not (tmp_path / "runs").exists()
    written(tmp_path, own="nnodes = 'two'")
    (tmp_path / "train.py").touch()
    wrong = holdfast("run", "train.py")
    assert wrong.returncode == 2 and "nnodes" in wrong.stderr
