"""Random faults of all processes of a run, one or two at once, at random moments. Results are compared bit for bit.

``python -m tests.soak.chaos [--faults 500] [--seed 1] [--steps 3000] [--layout ddp] [--script train.py]
[--flag=--spares=1]``

A worker, the agent, the controller, the zygote or the launcher is killed. A worker, the agent or a newcomer is stopped.
The newcomer is stopped in its start, after a worker was killed for it. In half of the pairs, the second fault hits the
recovery from the first. The layouts, or scripts, take turns, one training each. A dead launcher ends the run with a
sealed checkpoint. The same command is then started again, as a scheduler or a user would do. A fault counts as
recovered when every rank lives and the job has committed a step after the step of the fault. The exit code is 0 only if
every run ended with the bits of the undisturbed run: the results of the drill's own job, or the tensors of a script's
final checkpoint.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import statistics
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from holdfast import event_log
from holdfast.drill.digest import STATE, digest_of_checkpoint, digest_of_results
from holdfast.drill.exercise import LAYOUTS as ALL_LAYOUTS
from holdfast.drill.exercise import Exercise, require_torch, small
from holdfast.drill.observer import ObservedRun, PageSeen
from holdfast.drill.runner import end, launch
from holdfast.exit_codes import Exit
from holdfast.runtime.node.process_info import alive, kill_if, stopped
from holdfast.runtime.node.rundir import RunDir, open_log
from holdfast.text import plural

SAVE_EVERY = 50
POLL_S = 0.01
RECOVERED_S_MAX = 180.0  # a start may take 120 s
NEWCOMER_S_MAX = 20.0  # longest wait for the replacement of a killed process
NPROC = 4
NPROC_OF_SCRIPT = 2
QUIET_S = 1.0  # longest time between two faults
PAIR_S = 0.6  # longest time between the two faults of a pair
SIGNALS = {"stopped ": signal.SIGSTOP, "terminated ": signal.SIGTERM}
"""The signal by the first word of a victim's kind. Other victims get SIGKILL."""

KINDS = (
    *("worker", "worker", "worker", "stopped worker", "stopped newcomer"),
    *("agent", "stopped agent", "controller", "zygote", "launcher"),
)
LAYOUTS = ("ddp", "hsdp", "fsdp")
PAIRED = 0.35
SAID_EVERY_S = 30.0


@dataclass
class Tally:
    """The counts and times of all trainings.

    ``times_s``: seconds from the kill to a later committed step of all ranks, by victims. ``struck``: number of signals
    by kind of victim, including those just before the end of a training.
    """

    times_s: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    struck: Counter[str] = field(default_factory=Counter)
    faults: int = 0
    runs: int = 0
    failures: list[str] = field(default_factory=list)
    said_s: float = field(default_factory=time.monotonic)

    def say(self, place: Path, step: int) -> None:
        """Print the progress every 30 s, because a training may take ten minutes."""
        if time.monotonic() - self.said_s > SAID_EVERY_S:
            self.said_s = time.monotonic()
            print(
                f"  {plural(self.faults, 'fault')} so far, {place.parent.name}/{place.name} at step {step}",
                flush=True,
            )

    def rows(self) -> list[str]:
        """Return the lines of the table of recovery times."""
        lines = ["| victims | times | median s | p90 s | max s |", "|---|---|---|---|---|"]
        for victims, times_s in sorted(self.times_s.items()):
            ordered = sorted(times_s)
            p90 = ordered[min(len(ordered) - 1, int(0.9 * len(ordered)))]
            figures = f"{statistics.median(ordered):.2f} | {p90:.2f} | {ordered[-1]:.2f}"
            lines.append(f"| {victims} | {len(ordered)} | {figures} |")
        return lines


class Chaos:
    """One training with faults. It is started again whenever its launcher was killed.

    Args:
        base: directory of its runs, results and checkpoints.
        exercise: the training to run.
        draw: the random generator.
        tally: the counts to update.
    """

    kinds: Sequence[str] = KINDS
    paired = PAIRED

    def __init__(self, base: Path, exercise: Exercise, draw: random.Random, tally: Tally) -> None:
        self.base = base
        self.results = base / "results"
        self.nproc = exercise.nproc
        self._exercise = exercise
        self._draw = draw
        self._tally = tally
        self._starts = 0
        self._struck_s = 0.0  # time when a worker was last killed or stopped
        self._start()

    def work(self, faults: int) -> None:
        """Inject up to ``faults`` and let the training end."""
        try:
            while faults > 0 and self.settle():
                time.sleep(self._draw.uniform(0.0, QUIET_S))
                victims = self._draw.sample(self.kinds, 2 if self._draw.random() < self.paired else 1)
                if not self.hit(victims[:faults]):
                    break
                faults -= len(victims)
            if not self._tally.failures:
                self._finish()
        finally:
            end(self._launcher, self._run.directory)
            RunDir(self._run.directory).remove_pages()

    @property
    def cwd(self) -> Path | None:
        """Working directory of the runs; None: that of this process."""
        return None

    def undisturbed(self) -> None:
        """Let the training end without faults."""
        self._finish()

    def bits(self) -> str:
        """Return the digest of an ended training: of the results of its ranks, or of its final checkpoint."""
        if self._exercise.results:
            return digest_of_results(self.results, self.nproc, STATE)
        step = int(self._run.all_of("run_ended")[-1].data["step"])
        # The last start may have had nothing to do
        return digest_of_checkpoint(self.base / "checkpoints", None, step)

    def _start(self) -> None:
        self._starts += 1
        self._leaving = False  # the launcher was asked to end; a second signal would order it to end at once
        directory = self.base / f"run-{self._starts:03d}"
        told = ("--result", str(self.results)) if self._exercise.results else ()
        command = [*self._exercise.command, *told]
        with os.fdopen(open_log(self.base / "launcher.log"), "ab") as log:
            self._launcher = launch(
                directory, command, log, self.base / "checkpoints",
                cwd=self.cwd, nproc_per_node=self.nproc, max_restarts=10_000, grace_s=20,
            )  # fmt: skip
        self._run = ObservedRun(directory)

    def settle(self, beyond: int = -1) -> bool:
        """Wait until all ranks live and a step after ``beyond`` is committed. Return False if the training ended."""
        deadline_s = time.monotonic() + RECOVERED_S_MAX
        while time.monotonic() < deadline_s:
            if self._launcher.poll() is not None:
                if self._launcher.returncode == Exit.OK:
                    return False
                self._again()
            self._run.poll()
            self._tally.say(self._run.directory, self._run.committed_step())
            if self._run.ended and self._launcher.poll() is None:
                self._launcher.wait(RECOVERED_S_MAX)
                continue
            whole = len(self._run.workers()) == self.nproc and self._at_work()
            if whole and not self._leaving and self._run.committed_step() > max(beyond, 0):
                return True
            time.sleep(POLL_S)
        self._tally.failures.append(
            f"no step after {beyond} within {RECOVERED_S_MAX:g} s in {self._run.directory}"
        )
        return False

    def _at_work(self) -> bool:
        """Return True if no recovery is in progress, and none is due for a worker that was hit."""
        fenced, resumed = self._run.all_of("fenced"), self._run.all_of("resumed")
        since_s = max([self._struck_s, *(event.t_mono for event in fenced[-1:])])
        return bool(resumed) and resumed[-1].t_mono > since_s

    def _again(self) -> None:
        """Wait until no process is left of a run whose launcher was killed. Then start the same command again."""
        place = self._run.directory
        self._note_broken()
        if self._launcher.returncode not in (-signal.SIGKILL, Exit.REQUEUE, Exit.UNSAVED):
            raise RuntimeError(f"the run in {place} ended with {self._launcher.returncode}")
        until_s = time.monotonic() + RECOVERED_S_MAX
        while not journal_has(place, "agent_ended"):
            run = RunDir(place)
            agent = run.serving("agent")
            kill_if(agent, lambda pid, run=run: stopped(pid) and pid == run.serving("agent"))  # type: ignore[misc]
            if not agent and run.endpoint_path("agent").exists():
                break  # its agent died, too: the workers agree on an exit without it
            if time.monotonic() > until_s:
                break
            time.sleep(POLL_S)
        while (workers := self._run.workers()) and time.monotonic() < until_s:
            for worker in () if RunDir(place).serving("agent") else workers.values():
                kill_if(worker.pid, stopped)  # launcher and agent are gone: no other process kills it
            time.sleep(POLL_S)
        end(self._launcher, place)
        RunDir(place).remove_pages()  # agent and launcher are gone: no other process removes them
        self._start()

    def hit(self, victims: Sequence[str]) -> bool:
        """Kill or stop the victims, and wait until the job has recovered. Return False if the training has ended."""
        step = self._run.committed_step()
        struck: list[str] = []
        since_s = time.monotonic()
        for number, kind in enumerate(victims):
            if number:
                time.sleep(self._draw.uniform(0.0, PAIR_S) * self._draw.randrange(2))
                step = max(step, self._run.committed_step())
            pid = self._pid_of(kind)
            if pid and alive(pid):
                os.kill(pid, signal_of(kind))
                struck.append(kind)
                self._tally.struck[kind] += 1
                self._leaving |= signal_of(kind) == signal.SIGTERM
                if kind.endswith(("worker", "newcomer")):
                    self._struck_s = time.monotonic()
                self._tally.faults += 1
        if not struck:
            return True
        whole = self.settle(step)
        if whole:
            self._tally.times_s[" + ".join(sorted(struck))].append(time.monotonic() - since_s)
        return whole

    def _pid_of(self, kind: str) -> int:
        kind = kind.split()[-1]
        if kind == "launcher":
            return self._launcher.pid
        if kind in ("worker", "newcomer"):
            workers = self._run.workers()
            victim = workers[self._draw.choice(sorted(workers))] if workers else None
            if victim is None or kind == "worker":
                return victim.pid if victim else 0
            return self._newcomer(victim)
        return RunDir(self._run.directory).serving(kind)

    def _newcomer(self, victim: PageSeen) -> int:
        """Kill a worker. Return the pid of its replacement, or 0 if none starts."""
        kill_if(victim.pid, alive)
        until_s = time.monotonic() + NEWCOMER_S_MAX
        while time.monotonic() < until_s and self._launcher.poll() is None:
            seen = self._run.workers().get(victim.rank, victim)
            if seen.member > victim.member:
                return seen.pid
            time.sleep(POLL_S)
        return 0

    def _finish(self) -> None:
        while self._launcher.wait() != Exit.OK:
            self._again()
        self._run.poll()
        self._note_broken()

    def _note_broken(self) -> None:
        self._tally.failures += [f"{why}, in {self._run.directory}" for why in self._run.broken()]


def signal_of(kind: str) -> signal.Signals:
    """Return the signal for a kind of victim: ``signal_of("stopped worker") == signal.SIGSTOP``."""
    return next((number for word, number in SIGNALS.items() if kind.startswith(word)), signal.SIGKILL)


def journal_has(directory: Path, kind: str) -> bool:
    """Return True if the event log of a run has an event of this kind."""
    return any(event.kind == kind for event in event_log.read(directory / "events.jsonl").events)


def chaos(
    base: Path,
    faults: int,
    seed: int,
    exercises: Mapping[str, Exercise],
    start: Callable[[Path, Exercise, random.Random, Tally], Chaos] = Chaos,
    faults_each: int | None = None,
) -> Tally:
    """Run trainings of the given kinds in turn, until ``faults`` were injected. Return the counts.

    Args:
        faults_each: largest number of faults in one training.
    """
    tally = Tally()
    base.mkdir(parents=True)
    wanted: dict[str, str] = {}

    def training(name: str, kind: str, number: int) -> Chaos:
        place = base / name
        place.mkdir()
        return start(place, exercises[kind], random.Random(seed * 1000 + number), tally)

    while tally.faults < faults and not tally.failures:
        kind = list(exercises)[tally.runs % len(exercises)]
        if kind not in wanted:
            calm = training(f"undisturbed-{kind}", kind, 0)
            calm.undisturbed()
            wanted[kind] = calm.bits()
        tally.runs += 1
        before = tally.faults
        one = training(f"chaos-{tally.runs:03d}", kind, tally.runs)
        left = faults - tally.faults
        one.work(left if faults_each is None else min(left, faults_each))
        done = tally.faults - before
        if tally.failures:
            break  # the training may not have ended
        same = one.bits() == wanted[kind] != ""
        if not same:
            tally.failures.append(f"other bits in {one.base}")
        verdict = "identical" if same else "DIFFERENT"
        print(f"run {tally.runs}, {kind}: {plural(done, 'fault')}, bits {verdict}", flush=True)
    return tally


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Return its exit code."""
    parser = argparse.ArgumentParser(description="random faults of everything, many times")
    parser.add_argument("--faults", type=int, default=500)
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--layout", choices=ALL_LAYOUTS, action="append")
    parser.add_argument(
        "--script", type=Path, action="append", default=[], help="with a session, for two workers"
    )
    parser.add_argument("--flag", action="append", default=[], help="of holdfast run, as --flag=--spares=1")
    parser.add_argument("--run-dir", type=Path, default=Path("runs"))
    given = parser.parse_args(argv)
    require_torch()
    layouts = given.layout or (() if given.script else LAYOUTS)
    exercises = {name: small(name, given.steps, SAVE_EVERY, NPROC, given.flag) for name in layouts}
    for script in given.script:
        command = (*given.flag, str(script.absolute()))
        exercises[script.stem] = Exercise(command, NPROC_OF_SCRIPT, results=False)
    base, started_s = given.run_dir.absolute() / time.strftime("chaos-%Y%m%d-%H%M%S"), time.monotonic()
    tally = chaos(base, given.faults, given.seed, exercises)
    print("\n".join(tally.rows()))
    for failure in tally.failures:
        print(f"FAILED: {failure}")
    took_s = time.monotonic() - started_s
    print(f"{tally.faults} faults in {tally.runs} trainings, {took_s:.0f} s, logs in {base}")
    return 1 if tally.failures else 0


if __name__ == "__main__":
    sys.exit(main())
