"""The command ``holdfast drill``: what it refuses before it trains, how it ends on a signal, what it prints."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path

import pytest

from holdfast.cli.commands.drill import timeline
from holdfast.drill.timeline import InjectedFaultReport
from holdfast.exit_codes import Exit
from tests.cli.command import HOLDFAST, Run, clean_environment, working_in
from tests.cli.test_run import BOUND_S
from tests.runtime.runs import until, without_torch

WAITS = "import os, pathlib, time; pathlib.Path('up-' + os.environ['RANK']).touch(); time.sleep(600)"


def as_from_a_terminal() -> None:
    """Reset the signals. These tests may run under nohup or in the background, and children inherit ignored signals."""
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)


@pytest.mark.processes
@pytest.mark.parametrize(
    "signals",
    [
        ("SIGTERM",),
        pytest.param(("SIGHUP",), marks=pytest.mark.more),
        ("SIGINT", "SIGINT"),
        pytest.param(("SIGINT", "SIGTERM"), marks=pytest.mark.more),
    ],
)
def test_a_drill_that_is_told_to_end_leaves_nothing(tmp_path: Path, signals: tuple[str, ...]) -> None:
    (tmp_path / "train.py").write_text(WAITS)
    process = subprocess.Popen(
        [HOLDFAST, "drill", "--nproc", "2", "train.py"], preexec_fn=as_from_a_terminal,
        cwd=tmp_path, env=clean_environment(without_torch(tmp_path)), stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    until("up", lambda: all((tmp_path / f"up-{rank}").exists() for rank in range(2)))
    for name in signals:
        process.send_signal(signal.Signals[name])
    _, said = process.communicate(timeout=BOUND_S)
    assert process.returncode == Exit.INTERRUPTED
    assert said.endswith(" interrupted: the run was ended\n") and "Traceback" not in said
    assert working_in(tmp_path) == {}
    assert not list(tmp_path.rglob("pages"))


@pytest.mark.parametrize(
    ("args", "code", "says"),
    [
        (
            ("--run-dir", "/proc/nowhere"),
            Exit.USAGE,
            "cannot make the drill's directory /proc/nowhere/drill-",
        ),
        (("--json", "/proc/verdict.json"), Exit.USAGE, "--json /proc/verdict.json: "),
        (("tarin.py",), Exit.BAD_INPUT, "the training script tarin.py does not exist"),
        (("--fault", "kill:rank=4@step=2"), Exit.USAGE, "the run has ranks 0 to 3"),
    ],
)
def test_refused_before_anything_runs(
    holdfast: Run, tmp_path: Path, args: tuple[str, ...], code: Exit, says: str
) -> None:
    result = holdfast("drill", *args)
    assert (result.returncode, result.stdout) == (code, ""), result.stderr
    assert says in result.stderr and "next: " in result.stderr and "defect" not in result.stderr
    assert not list(tmp_path.glob("runs/*/*"))


def report(action: str) -> InjectedFaultReport:
    return InjectedFaultReport(kind="kill", rank=0, ranks=(0,), phase="forward", step=3, action=action, detected_s=0.25,
                       fenced_s=0.25, quiesced_s=0.5, planned_s=0.5, restored_s=2.0, resumed_s=4.0)  # fmt: skip


def test_the_timeline_is_aligned_and_tells_where_the_state_came_from() -> None:
    lines = timeline(report("replace")).plain.splitlines()
    assert lines[4] == "  restored     2.000 s    ████████            state taken from the survivors"
    assert all(len(line) <= 80 for line in lines)
    assert (
        timeline(report("restart_checkpoint")).plain.splitlines()[4].endswith("state of a checkpoint loaded")
    )


def test_bars_of_a_terminal_without_blocks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with (tmp_path / "out").open("w", encoding="ascii") as out:
        monkeypatch.setattr("sys.stdout", out)
        shown = timeline(report("replace")).plain
    assert "########" in shown and shown.isascii()
