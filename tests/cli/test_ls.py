"""The runs of a directory: shown by ``holdfast ls``, removed by ``holdfast gc``."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.cli.command import Run
from tests.cli.test_status import Made, swept

__all__ = ["swept"]

pytestmark = pytest.mark.usefixtures("swept")


@pytest.fixture
def runs(tmp_path: Path) -> Iterator[dict[str, Made]]:
    """Make four runs, oldest first: an ended one, one that was started again, its newest start, and a living one."""
    names = ("old", "again.1", "again", "living")
    made = {name: Made(tmp_path, name) for name in names}
    for number, (name, run) in enumerate(made.items()):
        os.utime(run.directory.path / "run.json", (number, number))
        run.start(0, 1)
        if name == "again":
            run.journal.append("session_opened", {"step": 20, "root": "", "generation": "1.1"})
            run.fault()
        if name == "living":
            run.serve()
        else:
            run.end(75 if name == "again.1" else 0)
    yield made
    for run in made.values():
        run.close()


def gc(holdfast: Run, *args: str) -> dict[str, Any]:
    result = holdfast("gc", "--json", *args)
    assert result.returncode == 0, result.stderr
    answer: dict[str, Any] = json.loads(result.stdout)
    return answer


def test_runs_are_listed_newest_first(holdfast: Run, runs: dict[str, Made]) -> None:
    head, *rows = holdfast("ls").stdout.splitlines()
    assert head.split("  ")[0] == "run"
    assert [row.split()[0] for row in rows] == ["living", "again", "again.1", "old"]
    assert "running" in rows[0] and "ended (75)" in rows[2] and "ended (0)" in rows[3]
    assert rows[1].endswith("start 2 of again, step 20") and rows[2].endswith("start 1 of again")
    listed = json.loads(holdfast("ls", "--json").stdout)
    assert [one["faults"] for one in listed] == [0, 1, 0, 0]
    assert [one["ended_s"] is None for one in listed] == [True, False, False, False]


def test_a_file_of_the_user_among_the_logs_stays(holdfast: Run, runs: dict[str, Made]) -> None:
    """Regression: only the names in the run directory itself were looked at."""
    for name, file in (
        ("old", "profile.json"),
        ("again", "rank-00000.env.jsonl"),
        ("again", "rank-00000.log"),
    ):
        logs = runs[name].directory.path / "attempt-000"
        logs.mkdir(exist_ok=True)
        (logs / file).touch()
    done = gc(holdfast, "--keep", "1")
    assert done["removed"] == ["again", "again.1"]
    assert "not Holdfast's: attempt-000/profile.json" in done["spared"]["old"]
    assert (runs["old"].directory.path / "attempt-000" / "profile.json").is_file()


def test_no_run_and_a_damaged_one(holdfast: Run, tmp_path: Path) -> None:
    assert "there is no run below" in holdfast("ls").stdout
    (tmp_path / "runs/bad").mkdir(parents=True)
    (tmp_path / "runs/bad/run.json").write_text("{")
    result = holdfast("ls")
    assert result.returncode == 0 and "bad is left out" in result.stderr


def test_ended_runs_beyond_the_newest_are_removed(
    holdfast: Run, runs: dict[str, Made], tmp_path: Path
) -> None:
    would = gc(holdfast, "--keep", "0", "--dry-run")
    assert would["removed"] == ["again", "again.1", "old"] and would["size_bytes"] > 0
    assert would["spared"] == {"living": "it is running"}
    assert len(list((tmp_path / "runs").iterdir())) == 4
    assert gc(holdfast, "--keep", "3")["removed"] == ["old"]
    assert gc(holdfast, "--keep", "0", "--days", "1")["removed"] == []
    assert "would remove again.1\n" in holdfast("gc", "--days", "0", "--dry-run").stdout
    assert gc(holdfast, "--days", "0")["removed"] == ["again", "again.1"]
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["living"]


def test_checkpoints_and_files_of_others_go_with_the_name_of_their_run_alone(
    holdfast: Run, runs: dict[str, Made], tmp_path: Path
) -> None:
    old, again = (runs[name].directory for name in ("old", "again"))
    old.checkpoints.mkdir()
    (old.checkpoints / "step-00000020.x").mkdir()
    (again.path / "model.pt").touch()
    done = gc(holdfast, "--keep", "1")
    assert done["removed"] == ["again.1"]
    assert "it holds checkpoints" in done["spared"]["old"] and "model.pt" in done["spared"]["again"]
    assert (old.checkpoints / "step-00000020.x").is_dir() and old.journal.is_file()
    wrong = holdfast("gc", "--keep", "1", "--checkpoints-of", "odl")
    assert wrong.returncode == 2 and "did you mean old?" in wrong.stderr
    assert gc(holdfast, "--keep", "1", "--checkpoints-of", "old")["removed"] == ["old"]
    assert not old.path.exists() and again.path.is_dir()


def test_a_run_that_a_living_one_saves_into_stays(holdfast: Run, runs: dict[str, Made]) -> None:
    root = runs["old"].directory.checkpoints
    root.mkdir()
    runs["living"].journal.append("session_opened", {"step": 0, "root": str(root), "generation": "1.1"})
    done = gc(holdfast, "--keep", "3", "--checkpoints-of", "old")
    assert done["removed"] == [] and done["spared"] == {"old": "living saves its checkpoints there"}


def test_directories_that_are_not_ours_stay(holdfast: Run, runs: dict[str, Made], tmp_path: Path) -> None:
    base = tmp_path / "runs"
    (base / "mine").mkdir()
    (base / "mine/thesis.tex").touch()
    runs["old"].directory.path.chmod(0o777)
    runs["again.1"].directory.path.rename(tmp_path / "elsewhere")
    (base / "again.1").symlink_to(tmp_path / "elsewhere")
    done = gc(holdfast, "--days", "0")
    assert done["removed"] == ["again"]
    assert "written by others" in done["spared"]["old"] and done["spared"]["again.1"] == "is a link"
    assert (base / "mine/thesis.tex").exists() and (tmp_path / "elsewhere/run.json").exists()


def test_a_run_without_an_end_on_record_stays(holdfast: Run, tmp_path: Path) -> None:
    made = Made(tmp_path, "gone")
    settings = msgspec.structs.replace(made.settings, created_at=time.time() - 3600)
    settings.save(made.directory.path)
    assert "--lost" in gc(holdfast, "--days", "0")["spared"]["gone"]
    assert gc(holdfast, "--days", "0", "--lost")["removed"] == ["gone"]


def test_what_shall_go_is_to_be_named(holdfast: Run) -> None:
    result = holdfast("gc")
    assert result.returncode == 2 and "next: holdfast gc --days 30 --dry-run" in result.stderr
