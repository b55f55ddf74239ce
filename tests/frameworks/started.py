"""Start scripts that leave processes behind: run one, find its workers by their environment, end them all."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from holdfast import event_log
from holdfast.runtime.node.spawn import free_port
from tests.frameworks.launched import until

BIN = Path(sys.executable).parent
BOUND_S = 400
MARK = "JOB_FOLDER"
"""Variable that tells the processes of one folder from all others."""


class Started:
    """A command in ``folder``, with this Python's commands first in PATH; a context manager that leaves nothing behind.

    Args:
        folder: working directory, and the value of ``JOB_FOLDER``.
        command: the command to run. Its output goes to ``out-N`` in ``folder``.
        env: added to the environment.
    """

    def __init__(self, folder: Path, *command: str, env: dict[str, str] | None = None) -> None:
        self.folder = folder
        folder.mkdir(exist_ok=True)
        self._out = folder / f"out-{len(list(folder.glob('out-*')))}"
        given = {"MASTER_PORT": str(free_port()), "MS_TFT_PORT": str(free_port()), **(env or {})}
        with open(self._out, "wb") as stream:
            self.process = subprocess.Popen(
                command, cwd=folder, stdout=stream, stderr=stream, start_new_session=True,
                env={**os.environ, "PATH": f"{BIN}:{os.environ['PATH']}", MARK: str(folder), **given},
            )  # fmt: skip

    def __enter__(self) -> Started:
        return self

    def __exit__(self, *error: object) -> None:
        sweep(self.folder)
        self.process.wait(BOUND_S)

    @property
    def output(self) -> str:
        """The output of the command."""
        return self._out.read_text()

    def wait(self) -> int:
        """Wait for the end of the command. Return its exit code."""
        return self.process.wait(BOUND_S)

    def wait_workers(self) -> None:
        """Wait until msrun and its workers have ended. With ``--join=False``, msrun ends first."""
        self.wait()
        until("the workers end", lambda: not processes(self.folder, MS_ROLE="MS_WORKER"), BOUND_S)

    def wait_said(self, text: str, log: Path) -> None:
        """Wait until ``log`` contains ``text``."""

        def said() -> bool:
            if self.process.poll():
                raise AssertionError(f"the command ended without {text!r}:\n{self.output}")
            return log.exists() and text in log.read_text()

        until(text, said, BOUND_S)


def log_of(run: Path, rank: int, attempt: int = 0) -> Path:
    """Return the file with the output of one rank of a ``holdfast run``."""
    return run / f"attempt-{attempt:03d}" / f"rank-{rank:05d}.log"


def kill_rank(run: Path, rank: int) -> None:
    """Kill the newest process of a rank of a ``holdfast run`` with SIGKILL."""
    started = [e.data for e in event_log.read(run / "events.jsonl").events if e.kind == "member_started"]
    os.kill(next(int(each["pid"]) for each in reversed(started) if each["rank"] == rank), signal.SIGKILL)


def processes(folder: Path, **variables: str) -> list[int]:
    """Return the ids of processes that were started in ``folder`` with these variables in their environment."""
    wanted = {f"{name}={value}".encode() for name, value in {MARK: str(folder), **variables}.items()}
    found = []
    for entry in Path("/proc").glob("[0-9]*/environ"):
        try:
            given = entry.read_bytes().split(b"\0")
        except OSError:
            continue
        if wanted.issubset(given):
            found.append(int(entry.parent.name))
    return found


def sweep(folder: Path) -> None:
    """Kill all processes that were started in ``folder`` and still run."""
    for pid in processes(folder):
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
