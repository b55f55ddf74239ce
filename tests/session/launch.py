"""Runs of ``holdfast run`` from start to end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO

import pytest

from holdfast import event_log
from holdfast.drill.failure_excerpt import Excerpt, text
from holdfast.drill.observer import broken
from holdfast.runtime.node.rundir import RunDir
from tests.cli.command import HOLDFAST, working_in

ROOT = Path(__file__).resolve().parents[2]  # jobs import helpers from here
BOUND_S = 100.0  # below pytest's bound, which includes the rest of the test
TORCHRUN = str(Path(sys.executable).with_name("torchrun"))
EVENTS_MAX = 60
EVENT_LENGTH_MAX = 200


def run_job(
    where: Path, nproc: int, *arguments: str, inside: Sequence[str] = ()
) -> subprocess.CompletedProcess[str]:
    """Run a job of ``nproc`` workers in ``where``.

    ``stdout`` has both streams. ``inside``: words before the command.
    """
    return _run(where, *inside, HOLDFAST, "run", "--nproc-per-node", str(nproc), *arguments)


def run_undisturbed_and_killed(
    where: Path, monkeypatch: pytest.MonkeyPatch, kill: str, *arguments: str
) -> str:
    """Run a job of two workers undisturbed and with two kills, and compare the results.

    Args:
        where: an empty directory.
        monkeypatch: sets the environment of the jobs.
        kill: the kills, as in ``tests/others/beat.py``.
        arguments: flags and the script.

    Returns:
        The output of both jobs.
    """
    results, output = [], ""
    for name, kills in (("undisturbed", ""), ("killed", kill)):
        (inside := where / name).mkdir()
        monkeypatch.setenv("KILL", kills)
        done = run_job(inside, 2, *arguments)
        assert done.returncode == 0, done.stdout
        assert not kills or "2 faults, 0 steps lost" in done.stdout, done.stdout
        results.append({path.name: path.read_text() for path in inside.glob("ended-*")})
        output += done.stdout
    assert results[0] == results[1] and len(results[0]) == 2
    return output


def start_job(where: Path, nproc: int, output: int | IO[bytes], *arguments: str) -> subprocess.Popen[str]:
    """Start a job in the background, as the run ``it``.

    Args:
        output: gets both streams.
        arguments: flags and the script; by default ``train.py``.
    """
    return subprocess.Popen(
        [HOLDFAST, "run", "--nproc-per-node", str(nproc), "--run-id", "it", *(arguments or ("train.py",))],
        cwd=where,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=output,
        stderr=subprocess.STDOUT,
        text=True,
    )


def run_torchrun(where: Path, nproc: int, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a job under torchrun, as :func:`run_job` does under ``holdfast run``."""
    return _run(where, TORCHRUN, "--standalone", "--nproc-per-node", str(nproc), *arguments)


def _run(where: Path, *command: str) -> subprocess.CompletedProcess[str]:
    """Run a command to its end. If the wait fails, print the job's output so far and kill all its processes."""
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    with tempfile.TemporaryFile() as output:  # an exception would lose the contents of a pipe
        job = subprocess.Popen(
            command, cwd=where, env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path},
            stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
        )  # fmt: skip
        try:
            code = job.wait(BOUND_S)
        except BaseException:  # pytest's timeout and Ctrl-C are not subclasses of Exception
            print(_said(output), *_events(where), _logs(where), sep="\n")
            end(where)
            job.wait()
            raise
        for log in where.glob("runs/*/events.jsonl"):
            assert not broken(event_log.read(log).events), "a successor hides it from the job"
        said = _said(output)
        assert "please report" not in said, said  # a defect of a search, which no job ends for
        return subprocess.CompletedProcess(command, code, said)


def _said(output: IO[bytes]) -> str:
    # Writers share the position in this file, so it must not move.
    return os.pread(output.fileno(), os.fstat(output.fileno()).st_size, 0).decode(errors="replace")


def _events(where: Path) -> list[str]:
    """Return the last events of each run in ``where``, one line each."""
    lines = []
    for log in sorted(where.glob("runs/*/events.jsonl")):
        events = event_log.read(log).events
        lines.append(f"{log}, {len(events)} events:")
        for event in events[-EVENTS_MAX:]:
            line = f"{event.t_mono - events[0].t_mono:8.3f} {event.who} {event.kind} {json.dumps(event.data)}"
            lines.append(line[:EVENT_LENGTH_MAX])
    return lines


def _logs(where: Path) -> str:
    """Return the end of each worker's output in these runs."""
    return text([Excerpt.of(log) for log in sorted(where.glob("runs/*/attempt-*/rank-*.log"))])


def end(where: Path) -> None:
    """Kill all processes that work in ``where`` until none is left, since a living one may start others."""
    while left := working_in(where):
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    for run in where.glob("runs/*"):
        RunDir(run).remove_pages()
