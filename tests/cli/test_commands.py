"""Promises of ``docs/commands.md`` to scripts and shells."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

import msgspec
import pytest

from holdfast.cli.commands import doctor, gc, ls, stacks
from holdfast.cli.main import COMMANDS
from holdfast.cli.screen import fault_report, run_view
from holdfast.drill import exercise, timeline
from holdfast.history import host_history, run_history
from holdfast.runtime.node.run_settings import RunSettings
from holdfast.sim import goodput, summary
from holdfast.store.manage import checkpoint_root, checkpoint_tools
from holdfast.store.read import validation
from tests.cli.command import Run

TEXT = (Path(__file__).resolve().parents[2] / "docs/commands.md").read_text()
DOCUMENTED: dict[str, type[msgspec.Struct]] = {
    "`status`": run_view.RunView,
    "in `ranks`": run_view.RankView,
    "in `hosts`": host_history.HostView,
    "in `faults`": run_history.FaultView,
    "in `spares`": run_view.SpareView,
    "`ls`": ls.Listed,
    "`gc`": gc.RemovedRuns,
    "`report`": fault_report.FaultReport,
    "in `timeline`": fault_report.PhaseTime,
    "`stacks`": stacks.RankStacks,
    "`doctor`": doctor.DoctorFinding,
    "`drill`": exercise.DrillVerdict,
    "in its `faults`": timeline.InjectedFaultReport,
    "`sim`": summary.Summary,
    "`sim --forecast`": goodput.Forecast,
    "`ckpt ls`, `ckpt verify`": validation.Validity,
    "`ckpt holders`": checkpoint_tools.BoxRecordHolders,
    "`ckpt prune`": checkpoint_root.Pruned,
}


def test_the_keys_of_json_are_documented() -> None:
    rows = {
        name: re.findall(r"`(\w+)`", keys)
        for name, keys in re.findall(r"^\| (.+?) \| .+? \| (`.+) \|$", TEXT, re.M)
    }
    assert rows == {
        name: [field.encode_name for field in msgspec.structs.fields(kind)]
        for name, kind in DOCUMENTED.items()
    }
    assert all(f"`{state}`" in TEXT for state in get_args(run_view.State))


@pytest.mark.parametrize("shell", sorted(set(re.findall(r"completion (bash|zsh|fish)", TEXT))))
def test_completion(holdfast: Run, shell: str) -> None:
    made = holdfast("completion", shell)
    assert made.returncode == 0 and f"_HOLDFAST_COMPLETE={shell}_complete" in made.stdout
    asked = holdfast(env={"_HOLDFAST_COMPLETE": "zsh_complete", "COMP_WORDS": "holdfast ", "COMP_CWORD": "1"})
    assert set(COMMANDS) <= set(asked.stdout.split("\n"))


def test_runs_and_files_are_completed(holdfast: Run, tmp_path: Path) -> None:
    for name in ("alpha", "beta"):
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / "run.json").touch()

    def asked(words: str, count: int) -> str:
        env = {"_HOLDFAST_COMPLETE": "bash_complete", "COMP_WORDS": words, "COMP_CWORD": str(count)}
        return holdfast(env=env).stdout

    assert asked("holdfast status be", 2) == "plain,beta\n"
    assert asked("holdfast status zz", 2) == asked("holdfast ckpt ls zz", 3) == "file,zz\n"


def test_ranks_attempts_and_checkpoints_are_completed(holdfast: Run, tmp_path: Path) -> None:
    run = tmp_path / "runs" / "alpha"
    (run / "attempt-000").mkdir(parents=True)
    RunSettings(run_id="alpha", nproc=12).save(run)
    names = [f"step-{step:08}.alpha.g1.1.a1" for step in (20, 3, 100)]
    for name in (*names, "notes"):
        (tmp_path / "ckpts" / name).mkdir(parents=True)

    def asked(*words: str) -> list[str]:
        env = {
            "_HOLDFAST_COMPLETE": "bash_complete", "COMP_WORDS": " ".join(words), "COMP_CWORD": str(len(words) - 1),
        }  # fmt: skip
        return holdfast(env=env).stdout.split()

    assert asked("holdfast", "logs", "alpha", "--rank", "1") == ["plain,1", "plain,10", "plain,11"]
    assert asked("holdfast", "stacks", "--rank", "7") == ["plain,7"]
    assert asked("holdfast", "logs", "alpha", "--attempt", "0") == ["plain,0"]
    assert asked("holdfast", "logs", "beta", "--rank", "1") == []
    newest_first = [f"plain,ckpts/{names[at]}" for at in (2, 0, 1)]
    assert asked("holdfast", "ckpt", "show", "ckpts/") == newest_first
    assert asked("holdfast", "ckpt", "verify", "ckpts/step-00000020") == [newest_first[1]]
    assert asked("holdfast", "ckpt", "show", "ckpts@") == [f"plain,ckpts@{step}" for step in (100, 20, 3)]
    assert asked("holdfast", "ckpt", "show", "ck") == ["file,ck"]


def test_help_of_a_command(holdfast: Run) -> None:
    assert holdfast("help", "status").stdout == holdfast("status", "--help").stdout
    assert holdfast("help", "ckpt", "ls").stdout == holdfast("ckpt", "ls", "--help").stdout
    assert holdfast("help").stdout == holdfast("--help").stdout
    wrong = holdfast("help", "ckpt", "vrify")
    assert wrong.returncode == 2 and "no command ckpt vrify; did you mean verify?" in wrong.stderr


QUESTIONS = (Path(__file__).resolve().parents[2] / "docs/questions.md").read_text()
ASKED = (
    "two nodes", "Slurm", "Kubernetes", "Ray", "slow", "Slack", "Prometheus", "TensorBoard", "Azure", "fewer GPUs",
    "notebook", "inference", "security", "disable", "memory",
)  # fmt: skip


def test_each_question_has_a_heading() -> None:
    headings = re.findall(r"^## (.+)$", QUESTIONS, re.M)
    assert [word for word in ASKED if not any(word in heading for heading in headings)] == []


def test_commands_in_answers_exist(holdfast: Run) -> None:
    shown = re.findall(r"^    (?:.* )?holdfast (run|status|ckpt \w+) (.*)$", QUESTIONS, re.M)
    assert len(shown) == 4
    for command, words in shown:
        known = holdfast(*command.split(), "--help").stdout
        flags = re.findall(r"(?<!\S)--[a-z-]+", words.partition("|")[0])
        assert [flag for flag in flags if flag not in known] == [], command
