"""Real runs of ``holdfast run`` for the tests of frameworks: start, watch, disturb, read."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from holdfast import event_log
from holdfast.event_log import Event

BOUND_S = 300.0


def until(what: str, condition: Callable[[], Any], bound_s: float = BOUND_S) -> Any:
    """Poll until ``condition()`` is true. Returns its value."""
    deadline_s = time.monotonic() + bound_s
    while time.monotonic() < deadline_s:
        value = condition()
        if value:
            return value
        time.sleep(0.02)
    raise AssertionError(f"{what}: not within {bound_s:g} s")


class Launched:
    """One ``holdfast run`` in ``folder``; a context manager that leaves nothing behind.

    Args:
        folder: working directory.
        arguments: after ``holdfast run --run-id NAME``.
        env: added to the environment.
        name: run id.
    """

    def __init__(
        self, folder: Path, *arguments: str, env: dict[str, str] | None = None, name: str = "t"
    ) -> None:
        self.folder = folder
        self.run = folder / "runs" / name
        command = [str(Path(sys.executable).parent / "holdfast"), "run", "--run-id", name, *arguments]
        folder.mkdir(parents=True, exist_ok=True)
        self._out = (folder / "out.log").open("wb")
        self.process = subprocess.Popen(
            command, cwd=folder, stdout=self._out, stderr=self._out, env={**os.environ, **(env or {})}
        )

    def __enter__(self) -> Launched:
        return self

    def __exit__(self, *error: object) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
            time.sleep(0.2)
            self.process.send_signal(signal.SIGINT)
            try:
                self.process.wait(20)
            except subprocess.TimeoutExpired:
                self.process.kill()
        self._out.close()

    def wait(self) -> int:
        """Wait for the end of the run. Return its exit code."""
        return self.process.wait(BOUND_S)

    @property
    def output(self) -> str:
        """The output of the launcher."""
        return (self.folder / "out.log").read_text()

    def log(self, rank: int, attempt: int = 0) -> str:
        """Return the output of one rank."""
        path = self.run / f"attempt-{attempt:03d}" / f"rank-{rank:05d}.log"
        return path.read_text() if path.exists() else ""

    def logs(self) -> str:
        """Return the output of all ranks."""
        return "".join(path.read_text() for path in sorted(self.run.glob("attempt-*/rank-*.log")))

    def wait_log(self, text: str, rank: int = 0, attempt: int = 0) -> None:
        """Wait until one rank has printed ``text``."""

        def said() -> bool:
            if self.process.poll() is not None and text not in self.log(rank, attempt):
                raise AssertionError(f"the run ended without {text!r}:\n{self.output}")
            return text in self.log(rank, attempt)

        until(text, said)

    def events(self, kind: str) -> list[Event]:
        """Return the events of one kind so far."""
        return [e for e in event_log.read(self.run / "events.jsonl").events if e.kind == kind]

    def pid(self, rank: int) -> int:
        """Return the pid of the newest process of a rank."""
        return next(
            int(e.data["pid"]) for e in reversed(self.events("member_started")) if e.data["rank"] == rank
        )

    def kill(self, rank: int) -> None:
        """Kill the newest process of a rank with SIGKILL."""
        os.kill(self.pid(rank), signal.SIGKILL)

    def said(self, pattern: str) -> list[str]:
        """Return all matches in the logs of all ranks."""
        return re.findall(pattern, self.logs())
