"""A real run of a training script under ``holdfast run``, observed from outside, with or without injected faults."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import msgspec

from holdfast import event_log
from holdfast.drill.failure_excerpt import last_words, launcher_log, text
from holdfast.drill.fault_spec import InjectedFault
from holdfast.drill.inject import Injected, InjectionPlan, read_injected
from holdfast.drill.observer import ObservedRun
from holdfast.errors import ScriptError
from holdfast.history.run_history import RunHistory
from holdfast.runtime.node.process_info import kill_if
from holdfast.runtime.node.run_processes import sweep
from holdfast.runtime.node.run_settings import SETTINGS_FILE
from holdfast.runtime.node.rundir import RunDir, open_log, write_private
from holdfast.store.backends.location import ROOT_VARIABLE

POLL_S = 0.05
STALL_S = 120.0  # a run without any progress for this time is ended
STOP_S = 10.0

Progress = Callable[[str, int, int], None]
"""A callback for progress. Its arguments: name of the run, its current step, number of faults injected so far."""


@dataclass(frozen=True)
class Outcome:
    """The outcome of a run that has ended. ``root`` is the directory of its checkpoints; empty without a session."""

    directory: Path
    code: int
    step: int
    duration_s: float
    injected: list[Injected]
    events: list[event_log.Event]
    root: str
    stalled: bool

    @staticmethod
    def read(directory: Path, code: int, duration_s: float, *, stalled: bool) -> Outcome:
        """Return the outcome of the run in ``directory``, from its event log and the log of the injector."""
        events = event_log.read(directory / "events.jsonl").events
        history = RunHistory.read(events)
        injected = read_injected(injected_path(directory))
        return Outcome(
            directory, code, history.step, duration_s, injected, events, root=history.root, stalled=stalled
        )

    @property
    def log(self) -> Path:
        """The path of the file with the launcher's output."""
        return launcher_log(self.directory)


class Runner:
    """A starter of runs below one directory.

    Args:
        base: directory of this drill.
        nproc: number of workers.
        command: the words after the flags of ``holdfast run``: a script or ``-m`` and a module, and its arguments.
        progress: called with the name of a run, its current step, and the number of faults injected so far.
    """

    def __init__(self, base: Path, nproc: int, command: Sequence[str], progress: Progress) -> None:
        self.base = base
        self.nproc = nproc
        self.command = list(command)
        self._progress = progress

    def run(
        self, name: str, extra: Sequence[str] = (), faults: Sequence[InjectedFault] = (), seed: int = 0
    ) -> Outcome:
        """Run the command to its end, and return the outcome.

        Args:
            name: name of the run directory below the base.
            extra: more arguments of the script.
            faults: the faults to inject, in order.
            seed: seed of the injector's random delays.

        Raises:
            ScriptError: the launcher ended before it had made the run directory.
        """
        directory = self.base / name
        started_s = time.monotonic()
        restarts = 16 + 2 * len(faults) if faults else 0
        with os.fdopen(open_log(launcher_log(directory)), "ab") as log:
            launcher = launch(
                directory, [*self.command, *extra], log, directory.absolute() / "checkpoints",
                nproc_per_node=self.nproc, max_restarts=restarts,
            )  # fmt: skip
        injector: subprocess.Popen[bytes] | None = None
        try:
            self._wait_made(directory, launcher)
            if faults:
                injector = self._start_injector(directory, faults, seed)
            stalled = not self._watch(directory, launcher)
        except BaseException:
            end(launcher, directory)
            raise
        finally:
            if injector is not None:
                injector.kill()
                injector.wait()
        if stalled:
            end(launcher, directory)
        return Outcome.read(directory, launcher.wait(), time.monotonic() - started_s, stalled=stalled)

    def _wait_made(self, directory: Path, launcher: subprocess.Popen[bytes]) -> None:
        while not (directory / SETTINGS_FILE).exists():
            if launcher.poll() is not None:
                raise failed(directory, launcher.returncode)
            time.sleep(POLL_S)

    def _start_injector(
        self, directory: Path, faults: Sequence[InjectedFault], seed: int
    ) -> subprocess.Popen[bytes]:
        plan, out = plan_path(directory), injected_path(directory)
        write_private(plan, msgspec.json.encode(InjectionPlan(tuple(faults), seed, self.nproc)))
        module = [sys.executable, "-m", "holdfast.drill.inject"]
        return subprocess.Popen([*module, str(directory), str(plan), str(out)], stdin=subprocess.DEVNULL)

    def _watch(self, directory: Path, launcher: subprocess.Popen[bytes]) -> bool:
        """Wait until the launcher ends. Return False if the run stopped making progress before that."""
        run = ObservedRun(directory)
        seen: tuple[int, ...] = ()
        step, moved_s = 0, time.monotonic()
        while launcher.poll() is None:
            run.poll()
            step = run.committed_step() or step  # the pages are removed at the end
            now = (step, len(run.events))
            if now != seen:
                seen, moved_s = now, time.monotonic()
            elif time.monotonic() - moved_s > STALL_S:
                return False
            self._progress(directory.name, step, len(read_injected(injected_path(directory))))
            time.sleep(POLL_S)
        return True


def launch(
    directory: Path,
    command: Sequence[str],
    log: IO[bytes],
    root: Path,
    cwd: Path | None = None,
    **flags: int,
) -> subprocess.Popen[bytes]:
    """Start ``holdfast run`` in the run directory ``directory``. Return the launcher's process.

    Args:
        command: the script and its arguments.
        log: file for the launcher's output.
        root: directory of the checkpoints.
        cwd: working directory of the run; None means that of this process.
        flags: more flags of ``holdfast run``.
    """
    all_flags = {"run_dir": directory.parent, "run_id": directory.name, **flags}
    given = [text for flag, value in all_flags.items() for text in (f"--{flag}", str(value))]
    return subprocess.Popen(
        [sys.executable, "-m", "holdfast", "run", *given, *command],
        stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True, cwd=cwd,
        env={**os.environ, ROOT_VARIABLE: str(root)},
    )  # fmt: skip


def plan_path(directory: Path) -> Path:
    """Return the path of the injector's plan for the run in ``directory``."""
    return directory.with_suffix(".plan.json")


def injected_path(directory: Path) -> Path:
    """Return the path of the file with the faults that were injected into the run in ``directory``."""
    return directory.with_suffix(".injected.jsonl")


def failed(directory: Path, code: int) -> ScriptError:
    """Return the error for a run that should have ended well, with the last lines of its logs."""
    said = text(last_words(directory))
    return ScriptError(
        f"the {directory.name} run ended with code {code}:\n{said}", hint=f"less {launcher_log(directory)}"
    )


def end(launcher: subprocess.Popen[bytes], directory: Path) -> None:
    """End a run, whatever its state, with all its processes: first with two Ctrl-C, then by force."""
    for _ in range(2):
        if launcher.poll() is None:
            launcher.send_signal(signal.SIGINT)
            time.sleep(0.2)
    try:
        launcher.wait(STOP_S)
    except subprocess.TimeoutExpired:
        launcher.kill()
        launcher.wait()
    run = RunDir(directory)
    for name in ("agent", "controller"):  # the agent first, because it would restart the controller
        kill_if(run.serving(name), lambda pid, name=name: pid == run.serving(name))  # type: ignore[misc]
    sweep(run)
